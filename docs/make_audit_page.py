"""Audits a small transformer written with Flax's own layers, and makes docs/audit.png: the page, in
a browser.

    python docs/make_audit_page.py            # writes docs/audit.html (not kept) and docs/audit.png
    python docs/make_audit_page.py --no-png   # where no Chromium is installed

The model is one that many write: bfloat16 computation, float32 parameters, dtypes threaded by hand.
The audit says what that leaves in half precision, and where float32 leaks on. It takes seconds and
runs nothing: shapes will do.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from policy.inspect.audit.audit import audit
from policy.inspect.audit.report import Audit

DOCS = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual."""

    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # x: (B, T, D)
        y = nn.LayerNorm(dtype=self.dtype, name="norm_1")(x)
        x = x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype, name="attn")(y)
        # The dtype was forgotten here, so that the next layer runs in float32.
        y = nn.LayerNorm(name="norm_2")(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], name="up")(y))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype, name="down")(y)


class Transformer(nn.Module):
    """Predicts the next of `vocabulary` tokens."""

    layers: int
    vocabulary: int = 512
    width: int = 128

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:  # (B, T) -> (B, T, V)
        x = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16, name="embed")(tokens)
        for i in range(self.layers):
            x = Block(name=f"layer_{i}")(x)
        return nn.Dense(self.vocabulary, dtype=jnp.bfloat16, name="head")(x)


def loss(params: Any, tokens: jax.Array, layers: int = 4) -> jax.Array:
    """Cross-entropy of the next token, its log-softmax in whatever the logits are in."""
    logits: Any = Transformer(layers=layers).apply({"params": params}, tokens[:, :-1])
    log_probabilities = jax.nn.log_softmax(logits)  # (B, T - 1, V)
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], -1).mean()


def audited() -> Audit:
    """The audit of the loss and its gradients."""
    tokens = jax.ShapeDtypeStruct((8, 129), jnp.int32)
    params = jax.eval_shape(Transformer(layers=4).init, jax.random.key(0), tokens)["params"]
    return audit(loss, params, tokens, backward=True)


def photograph(page: Path, png: Path, size: tuple[int, int] = (1500, 1150)) -> None:
    """Draws a page in a headless browser, in a window of this width and height."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(
            f"No browser is installed ({', '.join(BROWSERS)}): apt-get install chromium, or "
            "--no-png."
        )
    with tempfile.TemporaryDirectory() as profile:
        flags = (
            f"--user-data-dir={profile}",
            f"--window-size={size[0]},{size[1]}",
            "--force-device-scale-factor=0.62",
            f"--screenshot={png}",
        )
        subprocess.run(
            (browser, *FLAGS, *flags, page.resolve().as_uri()),
            check=True,
            capture_output=True,
            timeout=60,
        )
    _shrink(png)


def _shrink(png: Path) -> None:
    """Stores a picture in 64 colours: a third of its bytes."""
    from PIL import Image  # comes with matplotlib

    with Image.open(png) as picture:
        few = picture.convert("RGB").quantize(64)
    few.save(png, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DOCS, help="the folder to write to")
    parser.add_argument("--no-png", action="store_true", help="write the page alone")
    options = parser.parse_args()
    found = audited()
    page = options.out / "audit.html"
    found.save(page)
    print(f"wrote {page}: {len(found.findings)} findings")
    if not options.no_png:
        png = options.out / "audit.png"
        photograph(page, png)
        print(f"wrote {png}: {png.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
