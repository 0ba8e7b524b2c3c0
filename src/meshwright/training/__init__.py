"""The journey of a model: from a plain module to one that trains on every rank."""
