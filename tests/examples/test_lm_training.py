"""The model, its gradient, the training step, sampling, and what a run writes."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_lm
from flax import nnx
from lm import gradient_check, model, report, sampling
from lm.config import PRESETS, Config, from_flags
from lm.data import Corpus, batches
from lm.training import Trainer

SMALL = Config(layers=1, width=32, heads=4, kv_heads=2, mlp_width=32, seq_len=32, batch_size=32, steps=5)
TEXTS = Corpus([bytes((7 * i + j) % 97 for j in range(i)) for i in range(1, 60)], "here")


def test_a_run_writes_metrics_plot_checkpoints_and_text(uninterrupted, losses):
    out, output = uninterrupted
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert list(record) == ["step", "loss", "grad_norm", "lr", "tokens_per_s"]
        assert all(np.isfinite(value) and value > 0 for value in record.values())
    by_step = losses(out)
    assert len(by_step) == 30
    assert by_step[1] == pytest.approx(np.log(256), abs=0.05)
    assert by_step[30] < 4.5
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(step.name for step in (out / "checkpoints").iterdir()) == ["20", "25", "30"]
    assert "step 30/30  loss" in output
    assert "MFU -" in output
    assert "sample" in output
    assert "\ndef " in output


def test_two_devices_train_like_one(run, uninterrupted, losses, tiny, tmp_path):
    output = run(*tiny, "--out", str(tmp_path), XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert "2 x cpu" in output
    one, two = losses(uninterrupted[0]), losses(tmp_path)
    # Sums of two halves are rounded differently, and 30 steps of AdamW amplify that.
    assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-4)


@pytest.mark.parametrize("name", [name for name in PRESETS if name[0].isdigit()])
def test_presets_are_as_large_as_they_say(name):
    named = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    config = from_flags({"preset": name})
    assert model.parameter_count(config) == pytest.approx(named, rel=0.15)
    assert (config.dtype, config.remat) == ("bfloat16", True)
    assert config.accumulate > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_looks_up_what_the_embedding_has(dtype):
    embed = nnx.Embed(256, 16, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    tokens = jnp.array([[0, 255, 7], [7, 7, 1]])
    graph, params = nnx.split(embed)
    found, pull = jax.vjp(lambda params: model._look_up(nnx.merge(graph, params), tokens), params)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, embed(tokens))
    d_out = jax.random.normal(jax.random.key(0), found.shape, found.dtype)
    (gradient,) = jax.tree.leaves(pull(d_out))
    wanted = np.zeros((256, 16))
    np.add.at(wanted, tokens, np.asarray(d_out, np.float64))
    assert gradient.dtype == jnp.float32
    rounding = jnp.finfo(dtype).eps
    np.testing.assert_allclose(gradient, wanted, rtol=rounding, atol=4 * jnp.finfo(jnp.float32).eps)


def test_flash_and_flax_train_alike():
    losses = {}
    for attention, mlp in (("flash", "fused"), ("flax", "flax")):
        trainer = Trainer(dataclasses.replace(SMALL, attention=attention, mlp=mlp))
        state, data = trainer.initial_state(), batches(TEXTS, SMALL)
        taken = losses[attention, mlp] = []
        for _ in range(5):
            state, scalars = trainer.step(state, trainer.put(next(data)))
            taken.append(float(scalars["loss"]))
    ours, theirs = losses.values()
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[-1] < ours[0]


@pytest.fixture(scope="module")
def batch():
    """A batch of packed rows with unequal numbers of predicted bytes."""
    batch = next(batches(TEXTS, SMALL))
    predicted = batch["weights"].sum(axis=1)
    assert len(set(predicted)) > 1
    assert batch["segment_ids"].max() > 1
    return batch


def loss_and_grads(config: Config, batch):
    trainer = Trainer(config)
    return jax.jit(trainer.loss_and_grads)(trainer.initial_state().params, trainer.put(batch))


@pytest.fixture(scope="module")
def plain(batch):
    return loss_and_grads(SMALL, batch)


@pytest.mark.parametrize("changes", [{"accumulate": 4}, {"remat": True}])
def test_accumulation_and_remat_change_only_rounding(batch, plain, changes):
    loss, grads = loss_and_grads(dataclasses.replace(SMALL, **changes), batch)
    np.testing.assert_allclose(loss, plain[0], rtol=1e-6)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(plain[1]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_bfloat16_computes_near_float32_with_float32_gradients(batch, plain):
    loss, grads = loss_and_grads(dataclasses.replace(SMALL, dtype="bfloat16", remat=True), batch)
    assert float(loss) == pytest.approx(float(plain[0]), rel=1e-2)
    assert float(loss) != float(plain[0])
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_the_loss_is_the_mean_over_predicted_bytes(batch, plain):
    logits = jax.jit(model.create(SMALL))(batch["tokens"], batch["segment_ids"])
    log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    rows, places = np.nonzero(batch["weights"])
    want = -log_probs[rows, places, batch["targets"][rows, places]].mean()
    assert float(plain[0]) == pytest.approx(want, rel=1e-5)


def test_documents_in_a_row_do_not_see_each_other(batch):
    transformer = model.create(SMALL)
    row = int(np.argmax(batch["segment_ids"].max(axis=1)))
    tokens, segments = batch["tokens"][row : row + 1], batch["segment_ids"][row : row + 1]
    changed = np.where(segments == 1, (tokens + 1) % 256, tokens)
    predict = jax.jit(transformer)
    before, after = predict(tokens, segments), predict(changed, segments)
    others = segments[0] > 1
    assert np.array_equal(before[0, others], after[0, others])
    assert not np.array_equal(before[0, ~others], after[0, ~others])


def test_on_a_gpu_the_default_is_what_the_kernels_take(monkeypatch):
    assert from_flags({}).dtype == {"gpu": "bfloat16"}.get(jax.default_backend(), "float32")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert from_flags({}).dtype == "bfloat16"
    assert from_flags({"dtype": "float32"}).dtype == "float32"


def test_gradients_agree_with_flax(tiny, capsys):
    assert train_lm.main(["--verify-gradients", *tiny, "--dtype", "bfloat16"]) == 0
    float32, bfloat16 = capsys.readouterr().out.split("Both in bfloat16 against Flax in float32")
    attention, mlp = bfloat16.split("dot_product_attention: query")[1].split("mlp: x")
    for backends in (attention, mlp):
        assert "bfloat16" in backends
        assert jax.default_backend() != "cpu" or "backward on cpu: xla" in backends
    for group in (
        "embed",
        "attention query",
        "attention key",
        "attention value",
        "attention out",
        "mlp",
        "norms",
    ):
        assert f"\N{BOX DRAWINGS LIGHT VERTICAL} {group}" in float32
        assert f"\N{BOX DRAWINGS LIGHT VERTICAL} {group}" in bfloat16
    assert "NO" not in float32 + bfloat16


@pytest.mark.parametrize(
    ("dtype", "excess", "words"),
    [
        pytest.param(
            "float32", 1e-4, "gradients differ from Flax: attention key, attention out", marks=pytest.mark.exhaustive
        ),
        ("bfloat16", 0.25, "gradients differ from Flax in bfloat16: attention key, attention out"),
    ],
)
def test_a_wrong_gradient_is_found(tiny, capsys, monkeypatch, dtype, excess, words):
    class WrongGradient(model.ATTENTION["flash"]):
        """The right output. The gradient is too large by `excess` where the computation is in `dtype`."""

        def __call__(self, *args, **kwargs):
            out = super().__call__(*args, **kwargs)
            wrong = excess if out.dtype == dtype else 0.0
            return out * (1 + wrong) - jax.lax.stop_gradient(out * wrong)

    monkeypatch.setitem(model.ATTENTION, "flash", WrongGradient)
    monkeypatch.setattr(gradient_check, "_BATCHES_AGAIN", 2)
    assert train_lm.main(["--verify-gradients", *tiny, "--dtype", dtype]) == 1
    assert next(line for line in capsys.readouterr().out.splitlines() if "differ from Flax" in line).startswith(words)


def test_greedy_sampling_with_the_cache_repeats_the_whole_model():
    config = dataclasses.replace(SMALL, layers=2)
    transformer = model.create(config)
    # Larger logits than at initialisation, so that the likeliest byte is likely enough to survive rounding.
    transformer.head.kernel[...] *= 100.0
    predict = jax.jit(transformer)
    text = b"def "
    for _ in range(20):
        row = np.zeros((1, 24), np.int32)  # what follows the text is invisible to it
        row[0, : len(text)] = list(text)
        text += bytes([int(jnp.argmax(predict(row, np.zeros_like(row))[0, len(text) - 1]))])
    assert len(set(text)) > 5
    sampled = sampling.sample(config, nnx.state(transformer, nnx.Param), b"def ", 20, temperature=0.0)
    assert b"def " + sampled == text


def test_sampled_bytes_cannot_steer_the_terminal():
    assert sampling.printable(b"a\tb\n\x1b[2J\xff[red]\x07") == "a\tb\n�[2J�[red]�"


@pytest.mark.parametrize(
    ("platform", "kind", "shown"),
    [
        ("cpu", "cpu", "-"),
        ("gpu", "NVIDIA H100 80GB HBM3", "50.0%"),
        ("gpu", "NVIDIA H100 PCIe", "65.4%"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "158.5%"),
        ("gpu", "NVIDIA L40S", "unknown device"),
    ],
)
def test_utilisation(platform, kind, shown):
    device = types.SimpleNamespace(platform=platform, device_kind=kind)
    assert report.utilisation(2 * 494.5e12, device, 2) == shown


def test_flops_per_token_counts_matrices_and_attention():
    config = Config(layers=1, width=8, heads=2, kv_heads=1, mlp_width=10, seq_len=6)
    matrices = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 10 + 8 * 256
    visible = 6 / 2
    assert model.flops_per_token(config) == 6 * matrices + 3 * (2 * 2 * 8 * visible)
