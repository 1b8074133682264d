"""KoboldAI's API, with those of KoboldCpp's additions that its clients need."""
