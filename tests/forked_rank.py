"""Run a script in a forked rank as `python SCRIPT ...` does, and end as its interpreter would.

What the script has registered for its end is called. After an error or an exit code the process
stays for as long as it takes to take down an interpreter with torch: who is seen to outlive whom
depends on that.
"""

import atexit
import runpy
import signal
import sys
import time

TAKEN_DOWN_SECONDS = 0.6  # measured

code: object = None
atexit._clear()  # what was registered before the fork
# Nor would a rank that torchrun has started anew have torchrun's handlers of signals.
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
try:
    # Held to the end of the process. Where the last name of a process group is a DDP model's, torch
    # joins gloo's threads under the GIL, which one of them may wait for (seen with torch 2.13).
    sys.held_globals = runpy.run_path(sys.argv[0], run_name="__main__")  # type: ignore[attr-defined]
except SystemExit as end:
    code = end.code
except BaseException:  # noqa: BLE001  (whatever it is, Python prints it)
    sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
    sys.excepthook(*sys.exc_info())
    code = 1
atexit._run_exitfuncs()
if code:
    time.sleep(TAKEN_DOWN_SECONDS)
    sys.exit(code)
