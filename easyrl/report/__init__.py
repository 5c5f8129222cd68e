"""``easyrl report``: a run as one HTML file that needs no network.

Consumes: what a run has left in its folder, metrics, timeline, samples, certificate, configuration.
Produces: ``report.html``, whatever of these is missing. Nothing of a run depends on it.
"""
