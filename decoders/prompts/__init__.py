"""Prompts: prompts that come with the package, files of texts and conversations, and benchmarks as they are published."""
