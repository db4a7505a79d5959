"""Stores patterns, learns the kernel, retrieves corrupted queries.

python retrieve.py --config=configs/retrieval.py:VARIANT --config.KEY=VALUE
--workdir=DIR
"""

from uhop_jax.entry import retrieve

if __name__ == "__main__":
    retrieve()
