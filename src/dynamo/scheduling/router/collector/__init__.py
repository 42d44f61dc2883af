"""What routing came to, over time: report and alerts."""
