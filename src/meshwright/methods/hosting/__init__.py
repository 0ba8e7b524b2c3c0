"""What is in host memory or on disk: the parts of ``offload``."""
