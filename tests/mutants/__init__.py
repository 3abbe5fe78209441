"""Faults put into the code by a tool, one at a time: do the tests notice?"""
