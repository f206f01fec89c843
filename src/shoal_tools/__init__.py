"""Tools around Shoal: command line, doctor, launchers, lab, Spark and reports.

The library does not import them.
"""
