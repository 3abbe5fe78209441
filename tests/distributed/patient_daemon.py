"""The daemon, but it waits minutes for slow ranks and nodes instead of seconds.

For tests in which all of them deliver in the end: what a busy machine only delays is not missing,
and a rank that waits for the end of the test has not stopped.
"""

import sys

from ddpprobe.daemon import __main__, attempt, node
from ddpprobe.ends import stalls

attempt.HEAD_GRACE_SECONDS = attempt.NODE_GRACE_SECONDS = node.OTHERS_SECONDS = 180.0
stalls.LATE_SECONDS = 180.0
sys.exit(__main__.main())
