"""Do once, in the server that forks ranks, what each would do at its start; see [Note: forked ranks]."""

import sys

import meshwright.cli.train_loop
import meshwright.methods.zero
import meshwright.planner.trace.fake_pass  # noqa: F401
from meshwright.cli.commands import command
from meshwright.runtime import own_versions
from meshwright.runtime.lazy import freeze
from meshwright.runtime.torch_internals.interpreter import COMPILER

command()
own_versions()
if COMPILER in sys.modules:
    from meshwright.runtime.torch_internals.compilers import prepare_inductor

    prepare_inductor()
# No rank's collector looks at what is imported here: it would copy the pages that ranks share, and stop them meanwhile.
freeze()
