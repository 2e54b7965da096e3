"""Calls as programs of arrays, their results put back into trees and objects."""
