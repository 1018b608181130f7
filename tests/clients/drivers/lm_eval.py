"""lm-eval's local-completions: the score of a task, and of each choice its log-probability and whether it is greedy."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp()

import lm_eval


def drive(job: Any) -> dict[str, Any]:
    questions = os.path.join(os.environ["HF_HOME"], "questions.jsonl")
    with open(questions, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(question) + "\n" for question in job["questions"])
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": job["model"],
            "base_url": f"{job['base_url']}/completions",
            "tokenizer": job["tokenizer"],
            "tokenizer_backend": "huggingface",
            "max_length": 2048,
            "num_concurrent": 2,
            "max_retries": 1,
        },
        batch_size=4,
        tasks=[
            {
                "task": "questions",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": questions}},
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_choice": "{{choices}}",
                "doc_to_target": "{{answer}}",
                "metric_list": [{"metric": "acc"}],
            }
        ],
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["questions"], key=lambda sample: sample["doc_id"])
    shutil.rmtree(os.environ["HF_HOME"])
    return {
        "accuracy": found["results"]["questions"]["acc,none"],
        "choices": [
            [[float(score), str(greedy) == "True"] for score, greedy in sample["filtered_resps"]] for sample in samples
        ],
    }
