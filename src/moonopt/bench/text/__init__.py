"""Reinforcement fine-tuning of language models: rewards that can be verified, sampling, and the policy-gradient losses."""
