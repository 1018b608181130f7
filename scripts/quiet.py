"""Turns off the output of libraries in a process whose own output is the result."""

from __future__ import annotations

import logging
import os
import warnings

import structlog


def be_quiet() -> None:
    """transformers warns about tiny configs and draws progress bars; kvpool's own log is for services.

    To be called before transformers is imported, which reads these variables then; this imports neither it nor torch.
    """
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
