"""Exports of trained models in several formats, and their verification."""
