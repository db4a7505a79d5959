"""Stores patterns, learns the kernel, retrieves corrupted queries.

python retrieve.py --config=configs/retrieval.py:VARIANT --config.KEY=VALUE
--workdir=DIR
"""

from uhop_jax.command_line import retrieve

if __name__ == "__main__":
    retrieve()
