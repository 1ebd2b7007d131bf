"""Mamba-2 checkpoints: files of the published names and shapes, a model that numpy confirms, and back bit by bit."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from closeness import assert_bitwise_equal
from flax import nnx
from layers import mamba2_oracle
from safetensors.numpy import load_file, save_file

import fast_layers
from fast_layers import checkpoints, linen
from fast_layers.checkpoints import Mamba2LMConfig

# config.json of state-spaces/mamba2-130m, with sizes that a test can afford.
STATE_SPACES = {
    "d_model": 16,
    "d_intermediate": 0,
    "n_layer": 2,
    "vocab_size": 37,
    "ssm_cfg": {"layer": "Mamba2", "headdim": 8, "d_state": 6, "ngroups": 2},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}
# The same in Hugging Face's words, as its conversion writes them.
HUGGING_FACE = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 48,
    "state_size": 6,
    "head_dim": 8,
    "num_heads": 4,
    "n_groups": 2,
    "expand": 2,
    "conv_kernel": 4,
    "chunk_size": 256,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-05,
    "residual_in_fp32": True,
    "rms_norm": True,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, float("inf")],
    "use_bias": False,
    "use_conv_bias": True,
}
ROWS = 48  # 37 tokens, padded to a multiple of 16
CONFIGS = {"backbone.embedding.weight": STATE_SPACES, "backbone.embeddings.weight": HUGGING_FACE}
MIXER = {
    "in_proj.weight": (32 + 32 + 2 * 2 * 6 + 4, 16),
    "conv1d.weight": (32 + 2 * 2 * 6, 1, 4),
    "conv1d.bias": (32 + 2 * 2 * 6,),
    "dt_bias": (4,),
    "A_log": (4,),
    "D": (4,),
    "norm.weight": (32,),
    "out_proj.weight": (16, 32),
}
TOKENS = np.random.default_rng(1).integers(0, 37, (2, 9))


def published(embedding="backbone.embedding.weight", dtype=np.float32):
    """Tensors by the published names and shapes."""
    shapes = {embedding: (ROWS, 16), "backbone.norm_f.weight": (16,)}
    for i in range(2):
        shapes[f"backbone.layers.{i}.norm.weight"] = (16,)
        shapes |= {f"backbone.layers.{i}.mixer.{name}": shape for name, shape in MIXER.items()}
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.normal(size=shape) * 0.5).astype(dtype) for name, shape in shapes.items()}


def write(folder, tensors, config=STATE_SPACES):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits_of(model, tokens=TOKENS):
    graph, state = nnx.split(model)
    level = {"xla_backend_optimization_level": 0}
    return jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens), compiler_options=level)(state, tokens)


@pytest.mark.parametrize("embedding", CONFIGS)
def test_a_loaded_model_computes_what_the_paper_says(tmp_path, embedding):
    tensors = published(embedding)
    model = checkpoints.load_mamba2(write(tmp_path / "model", tensors, CONFIGS[embedding]))
    want = mamba2_oracle.language_model(tensors, TOKENS, n_layer=2, headdim=8, d_state=6, ngroups=2)
    assert want.shape == (2, 9, ROWS)
    np.testing.assert_allclose(logits_of(model), want, rtol=1e-3, atol=2e-4)


def test_sizes_of_numpy_are_written_as_json():
    config = Mamba2LMConfig(d_model=np.int64(64), n_layer=np.int32(2), vocab_size=50, headdim=32)
    assert json.loads(json.dumps(config.to_json("state-spaces")))["n_layer"] == 2
    with pytest.raises(ValueError, match="n_layer=True: must be an int, at least 1"):
        Mamba2LMConfig(d_model=64, n_layer=True, vocab_size=50)


def test_norm_eps_is_that_of_all_norms(tmp_path, monkeypatch):
    """Of blocks, mixers and the end, as in Hugging Face's; so large here that one of 1e-5 among them shows."""
    monkeypatch.setattr(mamba2_oracle, "rms_norm", functools.partial(mamba2_oracle.rms_norm, eps=0.5))
    tensors = published("backbone.embeddings.weight")
    model = checkpoints.load_mamba2(write(tmp_path, tensors, HUGGING_FACE | {"layer_norm_epsilon": 0.5}))
    sizes = {"headdim": 8, "d_state": 6, "ngroups": 2}
    want = mamba2_oracle.language_model(tensors, TOKENS, n_layer=2, **sizes)
    np.testing.assert_allclose(logits_of(model), want, rtol=1e-3, atol=2e-4)

    prefix = "backbone.layers.0.mixer."
    own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
    u = np.random.default_rng(3).normal(size=(2, 5, 16)).astype(np.float32)
    params = checkpoints.params_of(tensors, model.config)["layers"][0]["mixer"]
    got = linen.Mamba2(16, **sizes, norm_eps=0.5).apply({"params": params}, u)
    np.testing.assert_allclose(got, mamba2_oracle.mixer(own, u, **sizes), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("norm_eps", [-1e-5, float("inf"), float("nan"), "1e-5", True])
def test_norm_eps_that_no_norm_has(norm_eps):
    with pytest.raises(ValueError, match=r"norm_eps=.*: must be a number, 0 or more"):
        Mamba2LMConfig.from_json(HUGGING_FACE | {"layer_norm_epsilon": norm_eps})


def test_states_of_another_make():
    """Of mamba_ssm, whose cache of the convolution holds W inputs; and no pair."""
    options = Mamba2LMConfig.from_json(STATE_SPACES).mixer_options
    layer = nnx.eval_shape(lambda: fast_layers.Mamba2(16, headdim=8, d_state=6, ngroups=2, rngs=nnx.Rngs(0)))
    assert layer.options == options
    u, conv, ssm = np.zeros((2, 5, 16)), np.zeros((2, 56, 4)), np.zeros((2, 4, 8, 6))
    with pytest.raises(ValueError, match=r"got \(2, 56, 4\) and .*mamba_ssm's cache .* pass cache\[..., 1:\]"):
        layer(u, initial_state=(conv, ssm))
    for state, what in (((conv, ssm, 0), "3 items"), ((conv,), "1 item"), (conv, "ndarray")):
        with pytest.raises(ValueError, match=rf"initial_state: the state must be a pair \(conv, ssm\), .*{what}"):
            layer(u, initial_state=state)


def test_a_head_of_its_own(tmp_path):
    tensors = published() | {"lm_head.weight": np.random.default_rng(2).normal(size=(ROWS, 16)).astype(np.float32)}
    model = checkpoints.load_mamba2(write(tmp_path / "model", tensors, STATE_SPACES | {"tie_embeddings": False}))
    want = mamba2_oracle.language_model(tensors, TOKENS, n_layer=2, headdim=8, d_state=6, ngroups=2)
    np.testing.assert_allclose(logits_of(model), want, rtol=1e-3, atol=2e-4)
    checkpoints.save_mamba2(model, tmp_path / "again")
    assert_bitwise_equal(load_file(tmp_path / "again" / "model.safetensors"), tensors)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("embedding", CONFIGS)
def test_there_and_back_bit_by_bit(tmp_path, embedding, dtype):
    """Into a model and out again, in the file's own spelling; and through the other spelling."""
    tensors = published(embedding, dtype)
    tensors["backbone.layers.0.mixer.A_log"] = tensors["backbone.layers.0.mixer.A_log"].astype(np.float32)
    model = checkpoints.load_mamba2(write(tmp_path / "model", tensors, CONFIGS[embedding]))
    layouts = ["state-spaces", "huggingface"]
    if embedding == "backbone.embeddings.weight":
        layouts.reverse()
    checkpoints.save_mamba2(model, tmp_path / "same", layouts[0])
    assert_bitwise_equal(load_file(tmp_path / "same" / "model.safetensors"), tensors)
    checkpoints.save_mamba2(model, tmp_path / "other", layouts[1])
    other = load_file(tmp_path / "other" / "model.safetensors")
    assert set(other) != set(tensors)
    checkpoints.save_mamba2(checkpoints.load_mamba2(tmp_path / "other"), tmp_path / "back", layouts[0])
    assert_bitwise_equal(load_file(tmp_path / "back" / "model.safetensors"), tensors)


def test_the_dtype_of_parameters_can_be_chosen(tmp_path):
    folder = write(tmp_path / "model", published())
    model = checkpoints.load_mamba2(folder, dtype=jnp.float32, param_dtype=jnp.bfloat16)
    mixer = model.layers[0].mixer
    assert mixer.in_proj.kernel.dtype == model.embed.embedding.dtype == jnp.bfloat16
    assert mixer.A_log.dtype == mixer.D.dtype == mixer.dt_bias.dtype == jnp.float32
    assert jax.eval_shape(model, jax.ShapeDtypeStruct((1, 2), jnp.int32)).dtype == jnp.float32


def test_decoding_and_documents(tmp_path):
    model = checkpoints.load_mamba2(write(tmp_path / "model", published()))
    want = logits_of(model)
    predict = nnx.jit(lambda model, tokens, ids: model(tokens, segment_ids=ids))
    packed = predict(model, TOKENS, np.arange(9) // 5)
    np.testing.assert_allclose(packed[:, 5:], logits_of(model, TOKENS[:, 5:]), rtol=1e-3, atol=1e-4)
    model.init_cache((2,))
    decode = nnx.jit(lambda model, tokens: model(tokens, decode=True))
    got = [decode(model, TOKENS[:, start:stop]) for start, stop in ((0, 7), (7, 8), (8, 9))]
    np.testing.assert_allclose(jnp.concatenate(got, 1), want, rtol=1e-3, atol=1e-4)


def write_in_parts(folder, tensors):
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in parts.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(HUGGING_FACE))


def tensors_in(model):
    return checkpoints.tensors_of(nnx.to_pure_dict(nnx.state(model)), model.config, "huggingface")


def test_weights_in_several_files_and_saved_again_in_their_folder(tmp_path):
    tensors = published("backbone.embeddings.weight")
    write_in_parts(tmp_path, tensors)
    model = checkpoints.load_mamba2(tmp_path)
    assert_bitwise_equal(tensors_in(model), tensors)
    model.final_norm.scale[...] = jnp.full(16, 7.0)
    checkpoints.save_mamba2(model, tmp_path, "huggingface")
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    changed = tensors | {"backbone.norm_f.weight": np.full(16, 7.0, np.float32)}
    assert_bitwise_equal(tensors_in(checkpoints.load_mamba2(tmp_path)), changed)
    write_in_parts(tmp_path, tensors)  # such as another program left them there
    assert_bitwise_equal(tensors_in(checkpoints.load_mamba2(tmp_path)), changed)


def test_parts_that_are_no_whole(tmp_path):
    tensors = published("backbone.embeddings.weight")
    write_in_parts(tmp_path, tensors)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    first, second = sorted(set(weight_map.values()))
    name = next(name for name, file in weight_map.items() if file == first)
    own = load_file(tmp_path / second)
    save_file({**own, name: tensors[name] + 1}, tmp_path / second)
    with pytest.raises(ValueError, match=f"{second}: {name} is in a part before it, too"):
        checkpoints.load_mamba2(tmp_path)
    (tmp_path / second).unlink()
    with pytest.raises(FileNotFoundError, match=f"{second} is not there, .* lists .1 of 2 parts are missing.: downl"):
        checkpoints.load_mamba2(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match="its weight_map names no tensors"):
        checkpoints.load_mamba2(tmp_path)


def test_only_parts_in_the_folder_itself_are_deleted(tmp_path):
    model = checkpoints.load_mamba2(write(tmp_path / "model", published()))
    elsewhere = tmp_path / "elsewhere.safetensors"
    elsewhere.write_text("of another model")
    weight_map = {
        "a": "../elsewhere.safetensors",
        "b": "model.safetensors",
        "c": "config.json",
        "d": "gone.safetensors",
    }
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoints.save_mamba2(model, tmp_path / "model")
    assert elsewhere.is_file()
    assert {file.name for file in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}


def test_a_save_that_breaks_off_leaves_the_old_model(tmp_path, monkeypatch):
    model = checkpoints.load_mamba2(write(tmp_path, published()))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full_disk(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.numpy.save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        checkpoints.save_mamba2(model, tmp_path, "huggingface")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_tied_head_may_stand_in_the_file_and_padding_rows_may_not():
    config = Mamba2LMConfig.from_json(STATE_SPACES)
    tensors = published()
    embedding = tensors["backbone.embedding.weight"]
    plain = checkpoints.params_of(tensors, config)
    assert_bitwise_equal(checkpoints.params_of(tensors | {"lm_head.weight": embedding.copy()}, config), plain)
    short = checkpoints.params_of(tensors | {"backbone.embedding.weight": embedding[:37]}, config)
    assert_bitwise_equal(short["embed"]["embedding"][:37], embedding[:37])
    assert not short["embed"]["embedding"][37:].any()
    with pytest.raises(ValueError, match=r"lm_head.weight is not backbone.embedding.weight, though .*tie_embeddings"):
        checkpoints.params_of(tensors | {"lm_head.weight": embedding + 1}, config)


def test_shapes_are_the_published_ones():
    """mamba2-130m, of which the number of parameters is known: 128,989,632 with 50,288 rows of 768."""
    config = Mamba2LMConfig(d_model=768, n_layer=24, vocab_size=50277)
    shapes = checkpoints.tensor_shapes(config)
    assert shapes["backbone.embedding.weight"] == (50288, 768)
    assert shapes["backbone.layers.23.mixer.in_proj.weight"] == (3352, 768)
    assert shapes["backbone.layers.0.mixer.conv1d.weight"] == (1792, 1, 4)
    assert len(shapes) == 2 + 24 * 9
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 128_989_632
    small = Mamba2LMConfig.from_json(STATE_SPACES)
    assert checkpoints.tensor_shapes(small) == {name: x.shape for name, x in published().items()}


def test_configs_there_and_back():
    config = Mamba2LMConfig.from_json(STATE_SPACES)
    assert (config.vocab_size, config.vocab_rows, config.ngroups, config.dt_limit) == (37, ROWS, 2, (0, np.inf))
    assert Mamba2LMConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    theirs = Mamba2LMConfig.from_json(HUGGING_FACE)
    assert theirs == dataclasses.replace(config, vocab_size=ROWS, pad_vocab_size_multiple=1)
    assert Mamba2LMConfig.from_json(json.loads(json.dumps(config.to_json("huggingface")))) == theirs
    special = dataclasses.replace(config, d_ssm=16, D_has_hdim=True, dt_limit=(0.0, 0.1), bias=True)
    assert Mamba2LMConfig.from_json(special.to_json()) == special
    with pytest.raises(ValueError, match="d_ssm=16: Hugging Face's Mamba2 has None only"):
        special.to_json("huggingface")
    loose = dataclasses.replace(theirs, norm_eps=1e-3)
    assert Mamba2LMConfig.from_json(loose.to_json("huggingface")) == loose
    with pytest.raises(ValueError, match=r'norm_eps=0.001: .* 1e-05 only; .*layout="huggingface"'):
        loose.to_json()


# As JSON has no infinity: what Python's writer makes of it, what transformers does, and none.
LIMITS = {
    "Infinity": ([0.0, float("inf")], (0.0, np.inf)),
    "__float__": ([0.0, {"__float__": "Infinity"}], (0.0, np.inf)),
    "null": (None, (0.0, np.inf)),
    "finite": ([0.001, 1], (0.001, 1.0)),
}


@pytest.mark.parametrize(("written", "want"), LIMITS.values(), ids=LIMITS)
def test_limits_of_time_steps_as_files_write_them(written, want):
    theirs = json.loads(json.dumps(HUGGING_FACE | {"time_step_limit": written}))
    assert Mamba2LMConfig.from_json(theirs).dt_limit == want
    mixer = STATE_SPACES["ssm_cfg"] | {"dt_limit": written}
    assert Mamba2LMConfig.from_json(STATE_SPACES | {"ssm_cfg": mixer}).dt_limit == want


def test_what_only_initial_values_depend_on_is_ignored():
    mixer = STATE_SPACES["ssm_cfg"] | {"conv_init": 0.1, "A_init_range": [1, 8], "chunk_size": 128}
    assert Mamba2LMConfig.from_json(STATE_SPACES | {"ssm_cfg": mixer}) == Mamba2LMConfig.from_json(STATE_SPACES)


def test_every_mixer_option_has_its_tensors():
    """Names and shapes of a fresh model's own parameters, for options that change them."""
    for options in ({"bias": True, "conv_bias": False}, {"rmsnorm": False, "D_has_hdim": True}, {"d_ssm": 24}):
        config = Mamba2LMConfig(16, 1, 37, headdim=8, d_state=6, tie_embeddings=False, **options)
        model = nnx.eval_shape(lambda config=config: checkpoints.Mamba2LM(config, rngs=nnx.Rngs(0)))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params)
        tensors = checkpoints.tensors_of(zeros, config)
        assert len(tensors) == len(jax.tree.leaves(zeros))
        assert_bitwise_equal(checkpoints.params_of(tensors, config), zeros)


def changed(**changes):
    """The published tensors with some replaced, or left out if None."""
    tensors = published() | {name.replace("__", "."): x for name, x in changes.items()}
    return {name: x for name, x in tensors.items() if x is not None}


D = "backbone__layers__1__mixer__D"
BAD_TENSORS = {
    "missing": ({D: None}, "missing: backbone.layers.1.mixer.D. Do the tensors"),
    "unknown": ({"extra": np.zeros(1)}, "not part of such a model: extra"),
    "shape": ({D: np.zeros(5)}, r"backbone.layers.1.mixer.D must have shape \(4,\), got \(5,\)"),
    "all at once": ({D: None, "extra": np.zeros(1)}, "missing: backbone.layers.1.mixer.D; not part .*: extra"),
    "rows": ({"backbone__embedding__weight": np.zeros((40, 16))}, r"must have shape \(48, 16\), got \(40, 16\)"),
    "integers": ({D: np.ones(4, np.int64)}, "backbone.layers.1.mixer.D must be float16, .*, got int64"),
    "8 bits": ({D: np.ones(4, jnp.float8_e4m3fn)}, "backbone.layers.1.mixer.D must be float16, .*, got float8_e4m3fn"),
    "no embedding": ({"backbone__embedding__weight": None}, "one of backbone.embedding.weight and .*got neither"),
    "both spellings": ({"backbone__embeddings__weight": np.zeros((48, 16))}, "got both"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensors_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        checkpoints.params_of(changed(**changes), Mamba2LMConfig.from_json(STATE_SPACES))


def test_parameters_that_do_not_fit():
    config = Mamba2LMConfig.from_json(STATE_SPACES)
    params = checkpoints.params_of(published(), config)
    del params["layers"][0]["mixer"]["D"]
    with pytest.raises(ValueError, match=re.escape("parameters are missing: layers.0.mixer.D")):
        checkpoints.tensors_of(params, config)
    with pytest.raises(ValueError, match="params is a list: must be nested dicts"):
        checkpoints.tensors_of([], config)


def test_parameters_restored_by_orbax(tmp_path):
    """It makes strings of the layers' numbers."""
    config = Mamba2LMConfig.from_json(STATE_SPACES)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", checkpoints.params_of(published(), config))
        checkpointer.wait_until_finished()
        params = checkpointer.restore(tmp_path / "orbax")
    assert "0" in params["layers"]
    assert_bitwise_equal(checkpoints.tensors_of(params, config), published())


def _with_adapter(model):
    mixer = model.layers[1].mixer
    wide = mixer.in_proj.out_features
    mixer.in_proj = nnx.LoRALinear(16, wide, lora_rank=2, use_bias=False, rngs=nnx.Rngs(0))


def _with_bias(model):
    model.layers[0].mixer.out_proj = nnx.Linear(32, 16, rngs=nnx.Rngs(0))


def _with_head(model):
    model.head = nnx.Linear(16, ROWS, use_bias=False, rngs=nnx.Rngs(0))


def _with_block(model):
    model.layers.append(checkpoints.Mamba2LM(model.config, rngs=nnx.Rngs(0)).layers[0])


@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        (_with_adapter, r"layers.1.mixer.in_proj.lora.lora_a, layers.1.mixer.in_proj.lora.lora_b"),
        (_with_bias, "layers.0.mixer.out_proj.bias"),
        (_with_head, "head.kernel in .*: set tie_embeddings to false"),
        (_with_block, r"layers.2.mixer.A_log, .*layers.2.norm.scale"),
    ],
)
def test_parameters_without_a_place_are_not_left_out(tmp_path, change, unknown):
    """Nor is anything written, in whose place an older model may stand."""
    model = checkpoints.Mamba2LM(Mamba2LMConfig.from_json(STATE_SPACES), rngs=nnx.Rngs(0))
    change(model)
    with pytest.raises(ValueError, match=f"there is no place for {unknown}"):
        checkpoints.save_mamba2(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_float64(tmp_path):
    """As it is, where JAX has it; else as what is asked for, or not at all."""
    tensors = published("backbone.embeddings.weight", np.float64)
    folder = write(tmp_path, tensors, HUGGING_FACE)
    with jax.enable_x64(True):
        assert_bitwise_equal(tensors_in(checkpoints.load_mamba2(folder)), tensors)
    assert checkpoints.load_mamba2(folder, param_dtype=jnp.float32).embed.embedding.dtype == jnp.float32
    with pytest.raises(ValueError, match="is float64, which JAX has with jax_enable_x64 alone: set that, or pass"):
        checkpoints.load_mamba2(folder)


def test_numpy_settings_are_saved(tmp_path):
    config = dataclasses.replace(
        Mamba2LMConfig.from_json(STATE_SPACES), tie_embeddings=np.bool_(True), norm_eps=np.float32(1e-6)
    )
    checkpoints.save_mamba2(checkpoints.Mamba2LM(config, rngs=nnx.Rngs(0)), tmp_path, "huggingface")
    assert checkpoints.load_mamba2(tmp_path).config.norm_eps == config.norm_eps


def test_decoding_without_a_cache():
    model = checkpoints.Mamba2LM(Mamba2LMConfig.from_json(STATE_SPACES), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"no cache .*: call model.init_cache\(tokens.shape\[:-1\]\) first"):
        model(TOKENS, decode=True)
    model.init_cache(TOKENS.shape[:-1])
    assert model(TOKENS, decode=True).shape == (*TOKENS.shape, ROWS)
    with pytest.raises(ValueError, match="batch=2: must be the dims before the length"):
        model.init_cache(2)


BAD_CONFIGS = {
    "mamba 1": (STATE_SPACES | {"ssm_cfg": {}}, "ssm_cfg.layer is None: must be"),
    "a list": ([1], "config.json holds a list: must be an object"),
    "no ssm_cfg": (STATE_SPACES | {"ssm_cfg": None}, 'ssm_cfg=None: must be an object, with layer "Mamba2"'),
    "a flag": (STATE_SPACES | {"tie_embeddings": "no"}, "tie_embeddings='no': must be True or False"),
    "attention": (STATE_SPACES | {"attn_layer_idx": [1]}, r"attn_layer_idx=\[1\]: only models of Mamba-2 blocks"),
    "layer norm": (STATE_SPACES | {"rms_norm": False}, "rms_norm is false"),
    "unknown": (STATE_SPACES | {"ssm_cfg": {"layer": "Mamba2", "q": 1}}, "ssm_cfg has q: .* does not know that"),
    "incomplete": ({"d_model": 16, "ssm_cfg": {"layer": "Mamba2"}}, "no n_layer, vocab_size; is it"),
    "llama": ({"model_type": "llama"}, "model_type is 'llama': must be \"mamba2\""),
    "activation": (HUGGING_FACE | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "heads": (HUGGING_FACE | {"num_heads": 5}, "num_heads=5, but expand .* is 4"),
    "limit": (HUGGING_FACE | {"time_step_limit": [0, {"__float__": "q"}]}, "time_step_limit=.*must be .* two numbers"),
    "three limits": (HUGGING_FACE | {"time_step_limit": [0, 1, 2]}, r"time_step_limit=\[0, 1, 2\]: must be"),
    "ssm_cfg's limit": (
        STATE_SPACES | {"ssm_cfg": {"layer": "Mamba2", "dt_limit": 0.1}},
        r"ssm_cfg.dt_limit=0.1: must be",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_configs_that_do_not_fit(content, message):
    with pytest.raises(ValueError, match=message):
        Mamba2LMConfig.from_json(content)


def test_configs_of_another_type():
    for limit in (3, (1, 2, 3), ("x", 1)):
        with pytest.raises(ValueError, match=r"dt_limit=.*: must be a pair of numbers"):
            Mamba2LMConfig(16, 2, 37, headdim=8, dt_limit=limit)
    tensors, wanted = published(), "config is a dict: must be a Mamba2LMConfig; Mamba2LMConfig.from_json makes one"
    for misused in (
        lambda: checkpoints.params_of(tensors, STATE_SPACES),
        lambda: checkpoints.tensors_of({}, STATE_SPACES),
        lambda: checkpoints.tensor_shapes(STATE_SPACES),
        lambda: checkpoints.Mamba2LM(STATE_SPACES, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(ValueError, match=wanted):
            misused()


@pytest.mark.parametrize(("dtype", "size"), [("F8_E4M3", 8), ("F8_E5M2", 8), ("F4", 4), ("I8", 8), ("BOOL", 8)])
def test_weights_of_small_floats_and_integers(tmp_path, dtype, size):
    folder = write(tmp_path, published())
    entry = {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}
    header = json.dumps({"backbone.norm_f.weight": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(size)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=rf"backbone.norm_f.weight is of dtype {dtype}: must be float32, float16, bf"):
        checkpoints.load_mamba2(folder)


def test_files_that_are_damaged(tmp_path):
    folder = write(tmp_path, published())
    whole = {file: file.read_bytes() for file in folder.iterdir()}
    weights, config = folder / "model.safetensors", folder / "config.json"
    index = folder / "model.safetensors.index.json"
    again = re.escape("download or copy it again")
    for file, content, message in (
        (weights, whole[weights][:-5], rf"is damaged or no safetensors file \(.*\): {again}; of a pytorch_model.bin"),
        (weights, b"", "is damaged or no safetensors file"),
        (config, whole[config][:-5], rf"is damaged or no JSON \(.*\): {again}"),
        (config, b"\xff\xfe", "is damaged or no JSON"),
        (config, b"[1]", "holds a list: must be an object"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(file.name) + ".*" + message):
            checkpoints.load_mamba2(folder)
        file.write_bytes(whole[file])
    weights.unlink()
    for content, message in (
        ("{", "is damaged or no JSON"),
        ("[]", "must be an object with weight_map"),
        ('{"weight_map": {"a": ["b"]}}', "must be an object with weight_map"),
    ):
        index.write_text(content)
        with pytest.raises(ValueError, match=re.escape(str(index)) + ".*" + message):
            checkpoints.load_mamba2(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}'])
def test_a_damaged_index_is_no_model_to_replace(tmp_path, content):
    """Which parts it named cannot be told, and nothing is to be downloaded."""
    model = checkpoints.load_mamba2(write(tmp_path / "model", published()))
    index = tmp_path / "into" / "model.safetensors.index.json"
    index.parent.mkdir()
    index.write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(index)) + ".*: delete it, or save into another folder$"):
        checkpoints.save_mamba2(model, index.parent)
    assert [file.name for file in index.parent.iterdir()] == [index.name]


def test_what_is_no_model_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="model is a dict: must be a Mamba2LM, as load_mamba2 returns"):
        checkpoints.save_mamba2({}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_files_that_are_not_there(tmp_path):
    config = Mamba2LMConfig.from_json(STATE_SPACES)
    for given in (None, config):
        with pytest.raises(
            FileNotFoundError, match=r"^state-spaces/no-such-model: .* nothing is downloaded; .*snapshot"
        ):
            checkpoints.load_mamba2("state-spaces/no-such-model", given)
    with pytest.raises(ValueError, match="config is a dict: must be a Mamba2LMConfig"):
        checkpoints.load_mamba2(tmp_path, STATE_SPACES)
    with pytest.raises(FileNotFoundError, match=r"config.json is not there: pass config="):
        checkpoints.load_mamba2(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model.safetensors is not there; a pytorch_model.bin becomes one"):
        checkpoints.load_mamba2(tmp_path, config)
