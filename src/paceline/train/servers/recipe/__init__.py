"""The section `server` of a recipe, its rules, and the job and terms that follow from them."""
