"""What is not needed to train: pages, export, tables of predictions, studies, the plan, comparison of runs, data of other libraries.

The engine does not import it; the scripts do, and configs name its classes.
"""
