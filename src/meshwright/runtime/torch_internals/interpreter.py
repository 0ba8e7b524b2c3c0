"""Python's interpreter: what a program imports before it forks, and what its end does."""

import atexit

ATTRIBUTES_OF = ("atexit",)

# Processes of multiprocessing skip what trackers and users have registered for the end of the program. Replaced by a
# public function, once there is one.
run_exit_functions = atexit._run_exitfuncs

# All that ``torch.compile`` imports with inductor, in a second or two. It starts no thread (its workers come with the
# first graph), so that a process may fork after it.
COMPILER = "torch._inductor.compile_fx"
