"""Python's interpreter: what the end of a program does, for processes that end in another way."""

import atexit

ATTRIBUTES_OF = ("atexit",)

# Processes of multiprocessing skip what trackers and users have registered for the end of the program. Replaced by a
# public function, once there is one.
run_exit_functions = atexit._run_exitfuncs
