"""What recorded runs say beyond themselves: where two of them part.

Consumes: certificate, journal and metrics of runs that have ended or go on. Produces: answers for a
person; nothing is written into a run's folder.
"""
