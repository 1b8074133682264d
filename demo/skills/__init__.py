"""One file a family of skills: functions that make one question with its answer."""
