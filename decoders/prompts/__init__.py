"""Texts to be decoded: ready ones, files of texts and conversations, and the field's benchmarks as they are published"""
