"""Prompts: the package's own, files of texts and conversations, and the field's benchmarks as they are published"""
