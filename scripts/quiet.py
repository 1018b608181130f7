"""Turns off the output of libraries in a process whose own output is the result."""

from __future__ import annotations

import logging
import warnings


def be_quiet() -> None:
    """transformers warns about tiny configs and draws progress bars; kvpool's own log is for services."""
    warnings.simplefilter("ignore")
    import structlog
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
