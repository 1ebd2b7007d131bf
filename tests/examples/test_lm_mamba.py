"""The example with --arch mamba2 and hybrid: gradients, documents, resuming, sampling by state, sizes, mistakes."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_lm
from flax import nnx
from lm import model, sampling
from lm.config import Config, UserError, from_flags
from lm.data import Corpus, batches

# Two blocks: one of Mamba-2, one of attention and MLP.
HYBRID = ("--arch", "hybrid", "--layers", "2", "--ssm-state", "8", "--ssm-head-dim", "16")
SMALL = Config(
    arch="hybrid",
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    mlp_width=32,
    ssm_state=8,
    ssm_head_dim=16,
    seq_len=32,
    batch_size=8,
    steps=5,
)


def test_gradients_agree_with_flax(tiny, capsys):
    assert train_lm.main(["--verify-gradients", *tiny, *HYBRID]) == 0
    table = capsys.readouterr().out
    mamba = [f"mamba {name}" for name in ("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj")]
    for group in ("embed", *mamba, "attention key", "mlp", "norms", "head"):
        assert group in table
    assert "NO" not in table


class WrongGradient(model.MAMBA["fused"]):
    """The right output, with a gradient that is off by one part in ten thousand."""

    def __call__(self, *args, **kwargs):
        out = super().__call__(*args, **kwargs)
        return out * 1.0001 - jax.lax.stop_gradient(out * 0.0001)


@pytest.mark.exhaustive
def test_a_wrong_gradient_is_found(tiny, capsys, monkeypatch):
    monkeypatch.setitem(model.MAMBA, "fused", WrongGradient)
    flags = ["--arch", "mamba2", "--ssm-state", "4", "--ssm-head-dim", "16", "--seq-len", "16"]
    assert train_lm.main(["--verify-gradients", *tiny, *flags]) == 1
    assert "gradients differ from Flax: mamba A_log, mamba D" in capsys.readouterr().out


def test_documents_in_a_row_do_not_see_each_other():
    texts = Corpus([bytes((7 * i + j) % 97 for j in range(i)) for i in range(1, 30)], "here")
    batch = next(batches(texts, SMALL))
    row = int(np.argmax(batch["segment_ids"].max(axis=1)))
    tokens, segments = batch["tokens"][row : row + 1], batch["segment_ids"][row : row + 1]
    predict = jax.jit(model.create(SMALL))
    before = predict(tokens, segments)
    after = predict(np.where(segments == 1, (tokens + 1) % 256, tokens), segments)
    others = segments[0] > 1
    assert others.any()
    assert np.array_equal(before[0, others], after[0, others])
    assert not np.array_equal(before[0, ~others], after[0, ~others])


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tiny, losses, tmp_path, capsys):
    flags = [*tiny, *HYBRID, "--steps", "4", "--checkpoint-every", "2", "--sample-bytes", "0"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert train_lm.main([*flags, "--out", str(whole)]) == 0
    assert "hybrid, " in capsys.readouterr().out
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "4")
    assert train_lm.main(["--resume", "--out", str(resumed), "--sample-bytes", "0"]) == 0
    assert "resuming after step 2" in capsys.readouterr().out
    assert losses(resumed) == losses(whole)  # equal floats, not close ones
    assert json.loads((resumed / "config.json").read_text())["config"]["arch"] == "hybrid"


@pytest.mark.parametrize("arch", ["mamba2", "hybrid"])
def test_greedy_sampling_with_state_repeats_the_whole_model(arch):
    config = dataclasses.replace(SMALL, arch=arch)
    whole = model.create(config)
    # Larger logits than at initialisation, so that the likeliest byte is likely enough to survive rounding.
    whole.head.kernel[...] *= 100.0
    predict = jax.jit(whole)
    text = b"def "
    for _ in range(12):
        row = np.zeros((1, 16), np.int32)  # what follows the text is invisible to it
        row[0, : len(text)] = list(text)
        text += bytes([int(jnp.argmax(predict(row, np.zeros_like(row))[0, len(text) - 1]))])
    assert len(set(text)) > 4
    sampled = sampling.sample(config, nnx.state(whole, nnx.Param), b"def ", 12, temperature=0.0)
    assert b"def " + sampled == text


@pytest.mark.parametrize(("arch", "name"), [("mamba2", "125M"), ("hybrid", "125M"), ("mamba2", "1B")])
def test_presets_are_as_large_as_they_say(arch, name):
    named = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    config = from_flags({"preset": name, "arch": arch})
    # One block of each kind, counted as often as there are.
    kinds = [model.has_attention(config, layer) for layer in range(config.layers)]
    counted = {
        arch: model.parameter_count(dataclasses.replace(config, arch=arch, layers=1))
        for arch in ("transformer", "mamba2")
    }
    outside = 2 * 256 * config.width + config.width
    total = outside + sum(counted["transformer" if kind else "mamba2"] - outside for kind in kinds)
    assert total == pytest.approx(named, rel=0.15)


def test_a_hybrid_has_attention_in_every_fourth_block():
    config = dataclasses.replace(SMALL, layers=8)
    assert [model.has_attention(config, layer) for layer in range(8)] == [False, True, False, False] * 2
    assert not any(model.has_attention(dataclasses.replace(config, arch="mamba2"), layer) for layer in range(8))
    assert [type(block).__name__ for block in model.create(SMALL).blocks] == ["MambaBlock", "Block"]


def test_flops_per_token_counts_matrices_convolution_and_recurrence():
    config = Config(arch="mamba2", layers=1, width=8, heads=2, kv_heads=1, ssm_state=3, ssm_head_dim=4, seq_len=6)
    matrices = 8 * (4 * 8 + 2 * 3 + 4) + 4 * (16 + 2 * 3) + 16 * 8 + 8 * 256
    assert model.flops_per_token(config) == 6 * matrices + 3 * (2 * 2 * 16 * 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ssm_head_dim": 48}, "twice --width 128 is not divisible by --ssm-head-dim 48"),
        ({"ssm_state": 0}, "--ssm-state 0: must be at least 1"),
    ],
)
def test_wrong_sizes(changes, words):
    with pytest.raises(UserError, match=words):
        Config(arch="mamba2", **changes)
