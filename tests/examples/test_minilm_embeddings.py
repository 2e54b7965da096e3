"""all-MiniLM-L6-v2 in our layers: the published similarities, and a tiny BERT of random numbers."""

import dataclasses
import importlib.util
import json

import jax
import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="pip install tokenizers")
pytest.importorskip("safetensors", reason="pip install safetensors")

import minilm_embeddings as job
from safetensors.numpy import save_file

import policy as mp
from tests.examples.helpers import assert_rejected, assert_reported, shapes_of

TINY = job.Config(
    vocab_size=12,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=20,
    max_position_embeddings=16,
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = (*SPECIAL, "a", "cat", "dog", "sleeps", "runs", "home", "the", "sun")


def random_weights(config):
    """A BERT's weights by Hugging Face's names, large enough for every one of them to matter."""
    rng, d, wide = np.random.default_rng(0), config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, d),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, d),
        "embeddings.token_type_embeddings.weight": (config.type_vocab_size, d),
        "pooler.dense.weight": (d, d),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(config.num_hidden_layers):
        layer = f"encoder.layer.{i}"
        linear = {f"attention.self.{name}": (d, d) for name in ("query", "key", "value")}
        linear |= {"attention.output.dense": (d, d)}
        linear |= {"intermediate.dense": (wide, d), "output.dense": (d, wide)}
        for name, shape in linear.items():
            shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    shapes |= {f"{norm}.{part}": (d,) for norm in norms for part in ("weight", "bias")}
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def tiny():
    """Weights by their names there, and ours."""
    weights = random_weights(TINY)
    return weights, jax.tree.map(jax.numpy.asarray, job.flax_params(weights, TINY))


@pytest.fixture(scope="module")
def encode():
    model = job.SentenceEncoder(TINY)
    return jax.jit(lambda params, tokens, mask: model.apply({"params": params}, tokens, mask))


@pytest.fixture
def directory(tmp_path):
    """A model's folder as sentence-transformers has it, of a tiny model that knows eight words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer(WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.post_processor = TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_file(random_weights(TINY), tmp_path / "model.safetensors")
    stored = dataclasses.asdict(TINY) | {"model_type": "bert", "hidden_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    return tmp_path


BATCH = (
    np.array([[2, 4, 5, 7, 3], [2, 6, 3, 0, 0]], np.int32),
    np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool),
)


def test_the_tree_is_the_one_that_init_creates(tiny):
    created = jax.eval_shape(job.SentenceEncoder(TINY).init, jax.random.key(0), *BATCH)["params"]
    held = job.stored(job.flax_params(tiny[0], TINY), created)
    assert shapes_of(held) == shapes_of(created)
    wrong = {"embeddings.position_embeddings.weight": np.zeros((16, 11), np.float32)}
    with pytest.raises(ValueError, match=r"'positions'.*should be \(16, 12\), but is \(16, 11\)"):
        job.stored(job.flax_params(tiny[0] | wrong, TINY), created)


@pytest.mark.slow
def test_padding_changes_no_embedding(tiny, encode):
    (_, params), (tokens, mask) = tiny, BATCH
    with mp.use_policy("float32"):
        embeddings = encode(params, tokens, mask)
        other_padding = encode(params, np.where(mask, tokens, 9), mask)
        alone = encode(params, tokens[1:, :3], mask[1:, :3])
    np.testing.assert_array_equal(embeddings, other_padding)
    np.testing.assert_allclose(embeddings[1:], alone, rtol=0, atol=1e-6)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_matrices_are_multiplied_in_half_and_float32_runs_between_them(tiny, policy):
    from policy.testing import assert_reductions_in

    model, policy = job.SentenceEncoder(TINY), mp.get_policy(policy)
    root, rules = job.plan(policy, mp.PolicyRules(), plain=False)
    with mp.use_policy(root, rules):
        variables = jax.eval_shape(model.init, jax.random.key(0), *BATCH)
        report = mp.audit(model.apply, variables, *BATCH)
        assert_reductions_in(model.apply, (variables, *BATCH), "f32")
        assert jax.eval_shape(model.apply, variables, *BATCH).dtype == np.float32
    assert {x.dtype for x in jax.tree.leaves(variables)} == {policy.param_dtype}
    assert not [f for f in report.findings if f.kind in ("mixed-matmul", "low-precision-function")]
    assert job.plan(policy, mp.PolicyRules(), plain=True) == (policy, mp.PolicyRules())
    own = mp.PolicyRules([(job.MATRICES, "f32")])
    assert job.plan(policy, own, plain=False)[1] == own


@pytest.mark.slow
def test_own_sentences_are_embedded_reported_and_plotted(directory, tmp_path, capsys):
    path, file = tmp_path / "maps" / "map.png", tmp_path / "mine.txt"
    file.write_text("the sun\n\nthe cat runs home\n")
    given = ("a cat sleeps", "a dog sleeps", "the sun", "the cat runs home")
    arguments = [*given[:2], "--sentences", str(file), "--model", str(directory), "--plot"]
    arguments += [str(path), "--policy", "mixed_float16", "--rule", "layer_1/.*=f32"]
    (result,) = job.main([*arguments, "--batch-size", "2"])
    assert result.embeddings.shape == (4, TINY.hidden_size)
    assert result.embeddings.dtype == np.float32 and 0 < result.error < 1e-2
    np.testing.assert_allclose(np.linalg.norm(result.embeddings, axis=-1), 1, rtol=1e-6)
    weights = random_weights(TINY)
    held = sum(weight.size for name, weight in weights.items() if "pooler" not in name)
    assert result.parameter_bytes == 4 * held
    largest = f"{np.triu(result.similarities, 1).max():.4f}"
    assert_reported(capsys, path, "mixed_float16", *given, largest, "largest embedding error")


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one"], "A similarity takes two sentences at least."),
        (["--sentences", "no such file"], "[Errno 2] No such file or directory: 'no such file'"),
        (["--rule", "laier_0=f32", "--model", "{}"], "Rule 'laier_0' matched no "),
    ],
)
def test_a_bad_argument_is_one_line(directory, arguments, message):
    assert_rejected(job, [argument.format(directory) for argument in arguments], message)


@pytest.fixture(scope="module")
def results():
    """float32, mixed_bfloat16 and mixed_float16 on the published sentences."""
    if importlib.util.find_spec(job.PACKAGE) is None:
        pytest.skip(job.INSTALL)
    names = ("float32", "mixed_bfloat16", "mixed_float16")
    policies = {name: mp.get_policy(name) for name in names}
    found = job.run(policies, mp.PolicyRules(), job.model_directory(), job.PUBLISHED_SENTENCES)
    return {result.name: result for result in found}


@pytest.mark.slow
def test_the_published_similarities_come_out(results):
    assert job.off_published(results["float32"]) <= 5e-5  # half of the last digit printed there
    table = job.published_table(list(results.values())).splitlines()
    assert len(table) == 2 + len(job.PUBLISHED) == 14
    of_cats = (line for line in table if line.startswith("The cat sits outside"))
    row = next(line for line in of_cats if "the garden" in line)
    assert row.split()[-4:-2] == ["0.2838", "0.2838"]


@pytest.mark.slow
def test_half_precision_is_as_near_as_a_careful_hand_port(results):
    assert results["mixed_bfloat16"].error <= 1.1e-3
    assert results["mixed_float16"].error <= 1.5e-4
