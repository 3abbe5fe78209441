"""Pairs of Python and torch, an environment for each: do real jobs and fast tests hold?"""
