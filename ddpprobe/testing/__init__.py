"""Plant a fault, then prove that it is found: for our tests and for yours.

inject(model, "nan:step=60,rank=1,module=blocks.2.mlp")
inject(model, "explode:step=60,rank=0,module=head,phase=backward,factor=1e4")
"""

from ddpprobe.testing.fault import Fault as Fault
from ddpprobe.testing.injector import Injection as Injection
from ddpprobe.testing.injector import inject as inject
from ddpprobe.testing.state import state_hash as state_hash

__all__ = ["Fault", "Injection", "inject", "state_hash"]
