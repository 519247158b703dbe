"""How many replicas a number of agents needs: `stepspec size`.

`costs.py` is the file of measured costs, `simulation.py` the discrete-event simulation, `planning.py` the search for
the smallest number of replicas, and `tables.py` what is printed.
"""
