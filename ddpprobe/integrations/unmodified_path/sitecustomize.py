"""Python imports this as it starts, in each process below `ddpprobe run`: wait for an optimizer.

Most of these processes train nothing, so this imports nothing. It lets the `sitecustomize` run that
it hides, and asks to be told when torch's base class of optimizers is there. The first optimizer
that is made imports ddpprobe; what happens then is in `ddpprobe.integrations.unmodified`.
"""

import sys

_HERE = __file__.rpartition("/")[0]
_OPTIMIZER = "torch.optim.optimizer"


class _Finder:
    """Wraps the loader of one module; of all others it knows nothing."""

    def find_spec(self, name, path=None, target=None):
        if name != _OPTIMIZER:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _wrap(spec.loader)
                return spec
        return None


def _wrap(loader):
    execute = loader.exec_module

    def exec_module(module):
        execute(module)
        _watch(module.Optimizer)

    loader.exec_module = exec_module


def _watch(optimizer_class):
    original = optimizer_class.__init__

    def __init__(self, *args, **kwargs):  # noqa: N807  (it takes the place of one)
        original(self, *args, **kwargs)
        try:
            from ddpprobe.integrations.unmodified import take
        except ImportError as error:
            optimizer_class.__init__ = original
            sys.stderr.write(
                f"ddpprobe run: nothing is observed: {sys.executable} cannot import ddpprobe "
                f"({error}). Install it there: {sys.executable} -m pip install ddpprobe\n"
            )
            return
        take(self, lambda: setattr(optimizer_class, "__init__", original))

    __init__.__doc__, __init__.__wrapped__ = original.__doc__, original
    optimizer_class.__init__ = __init__


def _run_hidden():
    """Run the `sitecustomize` that would have been found without this one."""
    sys.path[:] = [path for path in sys.path if path.rstrip("/") != _HERE]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine


sys.meta_path.insert(0, _Finder())
_run_hidden()
