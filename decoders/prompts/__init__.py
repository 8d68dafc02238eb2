"""Prompts that come with the package, prompts from files, published benchmarks, and chat templates."""
