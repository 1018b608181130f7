"""Silence from libraries in a process whose own lines are the result."""

from __future__ import annotations

import logging
import warnings


def be_quiet() -> None:
    """transformers warns of what tiny configs are missing, and draws progress bars; our own log lines are for services."""
    warnings.simplefilter("ignore")
    import structlog
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
