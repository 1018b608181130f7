"""Which test of alerts.py makes which alerts fire."""

from __future__ import annotations

from typing import Final

FIRED_BY: Final = {
    "a_manager_that_is_gone": ("KvpoolManagerDown", "KvpoolWorkerWithoutManager"),
    "managers_of_which_none_leads": ("KvpoolNoLeader",),
    "a_worker_that_is_gone": ("KvpoolWorkerDown", "KvpoolWorkerLost", "KvpoolNoWorker", "KvpoolGatewayErrors"),
    "a_gateway_that_restarts_and_stays_away": ("KvpoolRestarts", "KvpoolGatewayDown"),
    "a_queue_that_is_full": ("KvpoolRequestsWaitLong", "KvpoolQueueNearlyFull", "KvpoolRequestsRefused"),
    "a_pool_that_is_too_small": ("KvpoolPoolFull", "KvpoolPreemptions"),
    "a_budget_that_is_used_up": ("KvpoolBudgetNearlyUsed", "KvpoolReportRefused"),
    "a_report_that_does_not_end": ("KvpoolRecoveryLasts",),
    "a_manager_with_mistakes": ("KvpoolLawBroken", "KvpoolManagerErrors"),
    "a_worker_whose_steps_fail": ("KvpoolWorkerErrors",),
}
"""By the fault, which is the test's name without `test_alerts_name_`."""
