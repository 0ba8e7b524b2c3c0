"""Imported first by the server that forks ranks: it ends with its launcher; see [Note: fast restarts]."""

from __future__ import annotations

import multiprocessing
import sys

from meshwright.runtime.restarts import end_with_parent

# Whoever imports this elsewhere, such as a tool that lists modules, is no server.
if multiprocessing.current_process().name == "MainProcess" and "forkserver" in " ".join(sys.orig_argv):
    end_with_parent()
