"""Experts divided over the mesh axis ``expert``: what ``expert_parallel`` finds, proves, divides and sends."""
