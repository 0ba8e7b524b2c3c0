"""Parts of ``fp8``: which layers, on which hardware, by which library, and what it costs."""
