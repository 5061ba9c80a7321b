"""Owns pruning by importance: which layers, channels and heads stay, and what cutting changes.

Refuses to know training. Targets here have parts that provably do nothing, and parts that do most.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.errors import ConfigError
from distill.initialization import PrunedConfig, ScratchConfig, initialize, start_draft
from distill.initialization.importance import block_influence, width_importance
from distill.models import LoadedModel, ModelConfig, ModelShape, load_target, shape_of
from tests.helpers import make_llama, save_pretrained_dir

SAMPLES = [[5, 9, 17, 3, 250, 31, 8], [40, 41, 42], [7] * 12]
TOKENS_BT = torch.tensor([[5, 9, 17, 3, 99, 120, 6]])


@pytest.fixture
def target(tiny_pair_dirs: tuple[Path, Path]) -> LoadedModel:
    """Four layers of width 64, an MLP of 128, four heads in two groups."""
    return load_target(ModelConfig(model=str(tiny_pair_dirs[0]), device="cpu"))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS_BT).logits


def wrapped(model: Any, tokenizer: Any, tmp_path: Path) -> LoadedModel:
    directory = save_pretrained_dir(tmp_path / "target", model, tokenizer)
    return load_target(ModelConfig(model=str(directory), device="cpu"))


def silence(target: LoadedModel, *, channels: list[int], mlp: list[int], group: int) -> None:
    """Zero hidden channels everywhere, MLP channels and a key/value group in every layer."""
    model = target.model
    head_dim, heads = model.config.head_dim, model.config.num_attention_heads
    per_group = heads // model.config.num_key_value_heads * head_dim
    with torch.no_grad():
        model.model.embed_tokens.weight[:, channels] = 0
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[mlp] = 0
            layer.mlp.down_proj.weight[channels] = 0
            layer.self_attn.o_proj.weight[channels] = 0
            layer.self_attn.v_proj.weight[group * head_dim : (group + 1) * head_dim] = 0
            queries = slice(group * per_group, (group + 1) * per_group)
            layer.self_attn.o_proj.weight[:, queries] = 7.0  # what reads nothing may be anything


# ---------------------------------------------------------------- depth


def test_the_layers_that_turn_the_stream_most_are_kept(target: LoadedModel) -> None:
    with torch.no_grad():
        for index, scale in enumerate((0.01, 1.0, 0.0, 0.3)):
            target.model.model.layers[index].mlp.down_proj.weight *= scale
            target.model.model.layers[index].self_attn.o_proj.weight *= scale
    config = PrunedConfig(layers="importance", num_layers=2)
    start = start_draft(config, target, seed=0, samples=SAMPLES)
    assert start.report["layers"] == [1, 3]
    influence = start.report["block_influence"]
    assert influence[2] == pytest.approx(0.0, abs=1e-6)
    assert influence[1] > influence[3] > influence[0] > influence[2]
    listed = initialize(PrunedConfig(layers=(1, 3)), target, seed=0)
    assert torch.equal(logits(start.draft.model), logits(listed.model))


def test_block_influence_of_a_layer_is_one_minus_the_mean_cosine(target: LoadedModel) -> None:
    """Against states worked out from the model's own record of them."""
    row = SAMPLES[0]
    with torch.no_grad():
        states = target.model(
            input_ids=torch.tensor([row]), output_hidden_states=True
        ).hidden_states
    before_TD, after_TD = states[1][0], states[2][0]
    cosines = (before_TD * after_TD).sum(-1) / (before_TD.norm(dim=-1) * after_TD.norm(dim=-1))
    measured = block_influence(target, [row])
    assert len(measured) == 4
    assert measured[1] == pytest.approx(1 - cosines.mean().item(), abs=1e-5)


def test_a_mean_over_rows_counts_every_position_once(target: LoadedModel) -> None:
    alone = [block_influence(target, [row])[0] for row in SAMPLES]
    weights = [len(row) for row in SAMPLES]
    expected = sum(a * w for a, w in zip(alone, weights, strict=True)) / sum(weights)
    assert block_influence(target, SAMPLES)[0] == pytest.approx(expected, rel=1e-5)


def test_importance_without_a_sample_is_refused_and_leaves_no_hook(target: LoadedModel) -> None:
    for config in (
        PrunedConfig(layers="importance", num_layers=2),
        PrunedConfig(layers=(0,), intermediate_size=64),
    ):
        assert config.num_sample_tokens == 4096
        with pytest.raises(ConfigError, match=r"0 of them here.*read_samples"):
            initialize(config, target, seed=0)
    assert PrunedConfig(layers=(0,)).num_sample_tokens == 0
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in target.model.modules()
    )


# ---------------------------------------------------------------- width


def test_channels_heads_and_mlp_channels_that_are_zero_are_left_out_without_any_change(
    target: LoadedModel,
) -> None:
    channels = list(range(0, 64, 4))  # a quarter of 64
    silence(target, channels=channels, mlp=list(range(128))[1::2], group=1)
    config = PrunedConfig(
        layers="first",
        num_layers=4,
        hidden_size=48,
        intermediate_size=64,
        num_attention_heads=2,
    )
    draft = initialize(config, target, seed=0, samples=SAMPLES)
    assert (draft.shape.hidden_size, draft.shape.intermediate_size) == (48, 64)
    assert (draft.shape.num_attention_heads, draft.shape.num_key_value_heads) == (2, 1)
    expected = logits(target.model)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits(draft.model), expected, atol=2e-5, rtol=1e-5)


def test_the_mean_square_over_fewer_channels_is_made_up_for_bit_by_bit_where_it_can_be(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """A quarter of the width: the gain is 2 and the epsilon 4 times, both exact in binary."""
    target = wrapped(make_llama(len(tiny_tokenizer), hidden=64, layers=1), tiny_tokenizer, tmp_path)
    silence(target, channels=list(range(16, 64)), mlp=[], group=0)
    with torch.no_grad():
        # the layer adds nothing, so that no product sums in another order
        target.model.model.layers[0].mlp.down_proj.weight.zero_()
        target.model.model.layers[0].self_attn.o_proj.weight.zero_()
    config = PrunedConfig(layers=(0,), hidden_size=16)
    draft = initialize(config, target, seed=0, samples=SAMPLES).model
    assert draft.config.rms_norm_eps == 4 * target.model.config.rms_norm_eps
    assert torch.equal(draft.model.norm.weight, 2 * target.model.model.norm.weight[:16])
    assert torch.equal(
        draft.model.embed_tokens.weight, target.model.model.embed_tokens.weight[:, :16]
    )


def test_a_width_of_the_target_itself_changes_no_bit(target: LoadedModel) -> None:
    config = PrunedConfig(
        layers="first",
        num_layers=4,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
    )
    draft = initialize(config, target, seed=0, samples=SAMPLES)
    assert draft.shape == target.shape
    assert torch.equal(logits(draft.model), logits(target.model))


def test_the_most_active_mlp_channels_are_kept_in_each_layer_for_itself(
    target: LoadedModel,
) -> None:
    loud = {0: [3, 50, 77], 3: [0, 1, 127]}
    with torch.no_grad():
        for layer, rows in loud.items():
            target.model.model.layers[layer].mlp.up_proj.weight[rows] *= 100
    draft = initialize(
        PrunedConfig(layers=(0, 3), intermediate_size=3), target, seed=0, samples=SAMPLES
    )
    for index, (layer, rows) in enumerate(loud.items()):
        kept, whole = (
            model.model.layers[number].mlp
            for model, number in ((draft.model, index), (target.model, layer))
        )
        assert torch.equal(kept.gate_proj.weight, whole.gate_proj.weight[rows])
        assert torch.equal(kept.down_proj.weight, whole.down_proj.weight[:, rows])


def test_a_key_value_group_stays_whole_with_its_query_heads(target: LoadedModel) -> None:
    """Four heads of 16 in two groups; the second group is made the louder one."""
    with torch.no_grad():
        target.model.model.layers[0].self_attn.v_proj.weight[16:] *= 50
    draft = initialize(
        PrunedConfig(layers=(0,), num_attention_heads=2), target, seed=0, samples=SAMPLES
    )
    kept, whole = (m.model.layers[0].self_attn for m in (draft.model, target.model))
    assert torch.equal(kept.q_proj.weight, whole.q_proj.weight[32:])
    assert torch.equal(kept.k_proj.weight, whole.k_proj.weight[16:])
    assert torch.equal(kept.o_proj.weight, whole.o_proj.weight[:, 32:])
    assert draft.model.config.head_dim == 16


def test_importances_are_means_of_what_the_layers_really_read(target: LoadedModel) -> None:
    seen: dict[str, torch.Tensor] = {}
    layer = target.model.model.layers[2]
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, name=name: seen.__setitem__(name, args[0][0])
        )
        for name, module in (("mlp", layer.mlp.down_proj), ("heads", layer.self_attn.o_proj))
    ]
    row = SAMPLES[0]
    measured = width_importance(target, [row])
    for handle in handles:
        handle.remove()
    # column 5 of the MLP; the group of heads 2 and 3, of 16 dimensions each
    mlp = sum(abs(value) for value in seen["mlp"][:, 5].tolist()) / len(row)
    assert measured.mlp_LF[2][5].item() == pytest.approx(mlp, rel=1e-5)
    heads_TE = seen["heads"]
    norms = heads_TE[:, 32:48].norm(dim=-1) + heads_TE[:, 48:64].norm(dim=-1)
    assert measured.groups_LG[2][1].item() == pytest.approx(norms.mean().item(), rel=1e-5)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_families_with_biases_and_head_norms_are_cut_and_load_again(
    family: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=1,
        pad_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    target = wrapped(model, tiny_tokenizer, tmp_path)
    silence(target, channels=list(range(16)), mlp=list(range(40, 64)), group=0)
    with torch.no_grad():
        for layer in target.model.model.layers:
            for linear in (layer.self_attn.v_proj, layer.self_attn.o_proj):
                if linear.bias is not None:
                    linear.bias.zero_()
    pruned = PrunedConfig(
        layers=(0, 1), hidden_size=16, intermediate_size=40, num_attention_heads=2
    )
    draft = initialize(pruned, target, seed=0, samples=SAMPLES)
    torch.testing.assert_close(logits(draft.model), logits(target.model), atol=2e-5, rtol=1e-5)
    directory = save_pretrained_dir(tmp_path / "draft", draft.model, tiny_tokenizer)
    again = load_target(ModelConfig(model=str(directory), device="cpu"))
    assert again.shape == draft.shape
    assert torch.equal(logits(again.model), logits(draft.model))


def test_a_family_that_is_not_known_is_refused_by_name(target: LoadedModel) -> None:
    target.model.config.model_type = "gemma2"
    with pytest.raises(ConfigError, match=r"'gemma2'.*llama, mistral, qwen2, qwen3.*scratch"):
        initialize(PrunedConfig(layers=(0,), hidden_size=32), target, seed=0, samples=SAMPLES)


SHAPE = ModelShape(
    num_hidden_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"hidden_size": 600}, r"hidden_size is 600, but the target has only 576"),
        ({"intermediate_size": 2048}, r"intermediate_size is 2048.*only 1536"),
        ({"num_attention_heads": 12}, r"num_attention_heads is 12.*only 9"),
        ({"num_attention_heads": 5}, r"is 5, but .* groups of 3.*multiple of 3"),
    ],
)
def test_counts_that_do_not_fit_the_target_are_refused_with_both(
    sizes: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PrunedConfig(layers="first", num_layers=2, **sizes).shape_from(SHAPE)


def test_a_width_the_heads_do_not_divide_is_refused_of_a_llama_only(
    target: LoadedModel, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Heads keep their size; that of a Llama's has to be the quotient as well."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = PrunedConfig(layers=(0,), hidden_size=31)
    with pytest.raises(ConfigError, match=r"hidden_size 31 is not a multiple .* 4, .*Llama"):
        initialize(config, target, seed=0, samples=SAMPLES)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    other = Qwen3Config(
        vocab_size=300, num_attention_heads=4, num_key_value_heads=2, eos_token_id=1, **sizes
    )
    qwen = wrapped(Qwen3ForCausalLM(other).eval(), tiny_tokenizer, tmp_path)
    draft = initialize(config, qwen, seed=0, samples=SAMPLES)
    assert draft.shape == config.shape_from(qwen.shape)
    assert (draft.shape.hidden_size, draft.shape.head_dim) == (31, 16)
    assert torch.isfinite(logits(draft.model)).all()


def test_a_width_that_stays_is_not_checked() -> None:
    odd = SHAPE.model_copy(update={"hidden_size": 575, "head_dim": 64})
    assert PrunedConfig(layers="first", num_layers=2).shape_from(odd).hidden_size == 575
    assert ScratchConfig(num_layers=2).shape_from(odd).head_dim == 64


def test_a_position_of_massive_activations_counts_like_any_other(target: LoadedModel) -> None:
    """Token 7 is one of three and 1000 times as large: a mean of squares would be its alone."""
    table_VD = target.model.model.embed_tokens.weight
    with torch.no_grad():
        table_VD[7] = 0.0
        table_VD[7, 3] = 1000.0
    found_D = width_importance(target, [[5, 9, 7]]).energies_LD["model.layers.0.input_layernorm"]
    squares_3D = table_VD[[5, 9, 7]].double().square()
    shares_3D = squares_3D / squares_3D.sum(-1, keepdim=True)
    torch.testing.assert_close(found_D, shares_3D.mean(0), rtol=1e-5, atol=1e-8)
    assert found_D.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert 1 / 3 <= found_D[3].item() < 0.5


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"hidden_size": 32},
        {"intermediate_size": 100},
        {"num_attention_heads": 2},
        {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 2},
    ],
)
def test_the_shape_said_beforehand_is_the_shape_that_is_built(
    target: LoadedModel, sizes: dict[str, int]
) -> None:
    config = PrunedConfig(layers="importance", num_layers=3, **sizes)
    draft = initialize(config, target, seed=0, samples=SAMPLES)
    expected = config.shape_from(target.shape)
    assert draft.shape == expected == shape_of(draft.model.config)
    assert expected.num_parameters == sum(p.numel() for p in draft.model.parameters())


def test_importance_repeats_itself_and_leaves_the_target_and_the_random_state_alone(
    target: LoadedModel,
) -> None:
    config = PrunedConfig(layers="importance", num_layers=2, hidden_size=32, intermediate_size=64)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    state = torch.random.get_rng_state()
    first = initialize(config, target, seed=0, samples=SAMPLES).model.state_dict()
    second = initialize(config, target, seed=0, samples=SAMPLES).model.state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for tensor in first.values():
        tensor.zero_()
    after = target.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


# ---------------------------------------------------------------- the rows


def table(tmp_path: Path, rows: list[dict[str, Any]]) -> Any:
    """Enough of an artifact for the reader: its table."""
    from distill.stages.completions import COMPLETIONS_FILE, write_rows

    write_rows(tmp_path / COMPLETIONS_FILE, rows)
    return SimpleNamespace(path=tmp_path, file=lambda name: tmp_path / name)


def row(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "split": "train",
        "status": "completed",
        "prompt_token_ids": [number],
        "completion_token_ids": [number, number],
        **changes,
    }


def test_samples_are_whole_answers_of_the_train_split_until_there_are_enough(
    tmp_path: Path,
) -> None:
    from distill.initialization import read_samples

    rows = [row(0), row(1, split="held_out"), row(2, status="rejected"), row(3), row(4)]
    rows += [row(5, status="truncated")]
    artifact = table(tmp_path, rows)
    # of 4 usable rows in the order first, third, second, fourth
    assert read_samples(artifact, 7) == [[0, 0, 0], [4, 4, 4], [3]]
    assert sorted(read_samples(artifact, 1000)) == [[n] * 3 for n in (0, 3, 4, 5)]


def test_an_artifact_without_a_train_answer_has_no_samples(tmp_path: Path) -> None:
    from distill.initialization import read_samples

    with pytest.raises(ConfigError, match="0 answers in its train split"):
        read_samples(table(tmp_path, [row(0, split="held_out")]), 10)
