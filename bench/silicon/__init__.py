"""Steps and prompts predicted from measured operators beside public measurements of servings."""
