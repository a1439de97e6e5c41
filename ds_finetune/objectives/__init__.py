"""Training objectives. An objective turns a forward into the batch's contribution to the loss of the step: sums over
units (tokens, pairs, examples), each divided by the number of these units in the global batch.
"""
