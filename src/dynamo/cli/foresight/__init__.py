"""Commands that look ahead: the record of requests, calibration, the configurator."""
