"""Cells chosen by hand: combinations that have broken somebody, or that only look harmless."""

from __future__ import annotations

from tests.grid.axes import DDP_TP, Cell

_CHOSEN = (
    Cell("ddp", "resnet", "eval"),
    Cell("ddp-bucket-view", "hf", "no-sync", "checkpoint"),
    Cell("ddp-unused", "branches", "accumulate"),
    Cell("ddp", "mlp", precision="scaler"),
    Cell("fsdp2", "tied", "accumulate", "wrapper", precision="mixed"),
    Cell("fsdp2", "moe", "no-sync", install="before"),
    Cell("fsdp2", "shared", memory="checkpoint", every=2),
    Cell("tp", "mlp"),
    Cell("ddp", "mlp", engine="whole"),
    Cell("fsdp2", "mlp", engine="block", memory="wrapper"),
)

# In `make test`, all in one launch of 2 ranks. The last one is not chosen as a corner: it stands in
# the grid for the pairs that it covers, and as a corner would change which others do.
CORE = (*_CHOSEN, Cell("ddp-unused", "moe", "two-optimizers", "wrapper"))
# What `install()` refuses as its numbers would be wrong; it is no part of the page.
REFUSED = (Cell(DDP_TP, "mlp"),)

CORNERS = (
    *_CHOSEN,
    Cell("fsdp1", "frozen", "accumulate"),
    Cell("pp", "mlp"),
    Cell("hsdp", "hf", "accumulate", ranks=4),
    Cell("fsdp2-tp", "mlp", "accumulate", ranks=4),
    Cell("fsdp2", "attention", "eval", ranks=4),
    Cell("ddp", "empty", "accumulate", ranks=4),
    Cell("plain", "resnet", ranks=1),
    Cell("plain", "hf", "accumulate", ranks=1),
    Cell("plain", "mlp", "lbfgs", ranks=1),
    Cell("plain", "mlp", precision="scaler", ranks=1),
    Cell("plain", "attention", "eval", ranks=1),
    Cell("plain", "sparse", "two-optimizers", ranks=1),
    Cell("ddp", "sparse", "accumulate", ranks=3),
    Cell("ddp-static", "shared", memory="reentrant", ranks=3),
    Cell("ddp-unused", "empty", "eval", ranks=3),
    Cell("fsdp2", "mlp", "no-optimizer", ranks=3),
    Cell("fsdp2", "empty", "no-sync", ranks=3),
    Cell("fsdp2", "frozen", "two-optimizers", "checkpoint", ranks=3),
    Cell("fsdp2", "mlp", "accumulate", "reentrant", ranks=3),
    Cell("fsdp2", "mlp", precision="scaler"),
    Cell("fsdp1", "mlp", "no-sync", precision="mixed", ranks=3),
    Cell("fsdp1-flat", "tied", "accumulate", ranks=3),
    Cell("hsdp1", "mlp", "no-sync", ranks=4),
    Cell("tp", "shared", "accumulate", ranks=3),
    Cell("pp", "mlp", memory="checkpoint", ranks=4),
)
