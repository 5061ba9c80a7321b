"""`python -m distill`: the command line.

Refuses to know anything else.
"""

from distill.cli import app

if __name__ == "__main__":
    app()
