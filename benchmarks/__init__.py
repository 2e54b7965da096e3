"""Ratios against upstream and peers, side by side in one run."""
