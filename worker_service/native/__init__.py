"""Steps of our own in place of transformers' modules: `description` says what a model computes, `cpu` computes it in C."""
