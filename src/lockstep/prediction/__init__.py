"""Predictions of a trained network as a table: a row for each input, in input order, under any strategy."""
