"""The code of the probes. Imported only in the process of a probe: these modules load torch at the top."""
