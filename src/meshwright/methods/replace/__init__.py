"""What ``module_replace`` exchanges, and how: each kind of module in a file of its own."""
